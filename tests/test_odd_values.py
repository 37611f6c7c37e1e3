"""Every option of every public function is given things of every kind: what it cannot use is refused by an error of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tests.mistakes.setting import Net, inputs, labels
from tpuflow.errors import DataError, TpuflowError
from tpuflow.training import entry, preparing
from tpuflow.training.train_step import Recipe

NOTHING = object()
ODD = (NOTHING, "nonsense", 3.5, -7, [], {}, True, (), np.ones(3), lambda *arguments: None, float("nan"), b"x", None)
DATA = (inputs, labels)
SINK = {"step_fn": lambda state, batch: (state, ()), "data": [inputs], "state": jnp.zeros(())}

FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    # name: (function, arguments that are not odd)
    "train": (tpuflow.train, {"model": Net(), "data": DATA, "eval_data": DATA}),
    "training_step": (tpuflow.training_step, {"model": Net(), "data": DATA}),
    "sink": (tpuflow.sink, SINK),
    "jit": (tpuflow.jit, {"fun": lambda x, n: x}),
    "estimate_training": (tpuflow.estimate_training, {"model": Net(), "data": DATA}),
    "get_chip": (tpuflow.get_chip, {"chip": "generic"}),
    "load_params": (tpuflow.load_params, {"path": "nothing", "like": {"w": inputs}}),
    "cross_entropy": (tpuflow.cross_entropy, {}),
    "LossScale": (tpuflow.LossScale, {"kind": "static"}),
    "Policy": (tpuflow.Policy, {"name": "mine"}),
    "Metric": (tpuflow.Metric, {"name": "mine", "fn": lambda outputs, labels: outputs}),
    "LossMonitor": (tpuflow.LossMonitor, {}),
    "EarlyStopping": (tpuflow.EarlyStopping, {}),
    "ModelCheckpoint": (tpuflow.ModelCheckpoint, {"directory": "run"}),
    "SummaryWriter": (tpuflow.SummaryWriter, {"directory": "run"}),
}
CASES = [
    (name, option)
    for name, (function, _) in FUNCTIONS.items()
    for option, parameter in inspect.signature(function).parameters.items()
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and (name, option) != ("train", "state")  # of another model
]
FREE = {("LossMonitor", "out"), ("estimate_training", "params")}
"""What is used as it is given, or not at all."""


class Accepted(Exception):
    """The arguments were taken."""


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_what_an_option_cannot_use_is_refused_by_an_error_of_ours(name: str, option: str, monkeypatch, tmp_path) -> None:
    def stop(*arguments: Any) -> None:
        raise Accepted

    function, arguments = FUNCTIONS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "Training", stop)
    if option != "params":
        # Computing the state takes long, and is no option's check.
        monkeypatch.setattr(preparing, "_initial_variables", lambda *arguments: (None, None))
        monkeypatch.setattr(Recipe, "initial_state", lambda *arguments: None)
    for odd in ODD:
        try:
            function(**{**arguments, option: odd})
        except (TpuflowError, Accepted) as error:
            refused = isinstance(error, TpuflowError)
        else:
            refused = False
        assert refused or odd is not NOTHING or (name, option) in FREE


WRONG_DATA = {
    "a number": 5,
    "a path": "mnist.npz",
    "no batches": [],
    "no arrays": (inputs[:0], labels[:0]),
    "a function of nothing": lambda: None,
    "a label missing": (inputs, labels[:-1]),
    "words": (inputs, np.array(["a"] * 40)),
    "samples": list(zip(inputs, labels, strict=True)),
    "other features": (inputs[:, :5], labels),
    "labels out of range": (inputs, labels + 3),
    "labels of another shape": (inputs, labels[:, None]),
    "batches of unequal parts": [(inputs[:8], labels[:7])],
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_an_error_of_the_data_says_which_data_are_meant(name: str) -> None:
    wrong = WRONG_DATA[name]
    with pytest.raises(DataError, match="^eval_data: "):
        tpuflow.train(Net(), DATA, eval_data=wrong)
    if name != "other features":  # these are what the model is made for then
        with pytest.raises(DataError, match="^data: "):
            tpuflow.train(Net(), wrong)
