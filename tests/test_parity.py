"""Training on the simulated device gives the documented figures, and PyTorch's, within the stated bounds."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tpuflow.errors import ConfigError, TpuflowError
from train import cifar10, losses_beside, parity, parity_cifar, parity_mnist, parity_yolov5
from train.detection.hyperparameters import Hyperparameters
from train.published import exit_status, judged
from train.yolov5 import Yolov5Options

pytestmark = pytest.mark.optimised


@pytest.mark.slow
@pytest.mark.parametrize("policy", parity_mnist.BOUNDS)
def test_five_epochs_give_every_documented_figure(policy, fashion_mnist):
    figures, problems, _ = parity_mnist.run_policy(policy, fashion_mnist, progress=False)
    assert len(figures) == 20
    assert [str(figure) for figure in figures if not figure.holds] + problems == []


@pytest.mark.torch
@pytest.mark.parametrize("steps", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_the_first_losses_of_the_cifar_network_are_those_of_pytorch(torch, steps):
    figures = parity_cifar.report(cifar10.load(), steps, whole=False, progress=False, names=("PyTorch", "PyTorch, float64"))
    ours = figures["losses"]["ours"]
    assert len(ours) == steps and ours[-1] != ours[0]
    assert figures["differences"]["ours"]["beyond"] == 0, figures["differences"]
    assert figures["differences"]["PyTorch, float64"]["largest"] > 0.0, "the reference must not be compared with itself"
    assert figures["failed"] == 0


def test_a_loss_beyond_the_bound_is_counted_and_found():
    reference = np.linspace(2.0, 1.0, 5)
    found = reference * (1 + np.array([0, 1e-6, 0, 2e-5, 0]))
    assert parity_cifar.difference(found, reference) == {"largest": pytest.approx(2e-5), "at_step": 4, "beyond": 1}
    assert parity_cifar.difference(np.full(5, np.nan), reference)["beyond"] == 5


@pytest.mark.torch
@pytest.mark.parametrize(
    "options, hyp, frozen",
    [
        ({"optimizer": "Adam"}, {}, ()),
        ({"label_smoothing": 0.1}, {}, ()),
        ({}, {"cls_pw": 2.0}, ()),
        ({}, {"fl_gamma": 1.5}, ()),
        ({}, {}, ("model_0/*",)),
    ],
)
def test_a_run_of_yolov5_that_pytorchs_loop_does_not_follow_is_refused(torch, tmp_path, options, hyp, frozen):
    job = Mock(hyp=Hyperparameters(**hyp), frozen=frozen)
    run = parity_yolov5.Finished(tmp_path, Yolov5Options(**options), job)
    with pytest.raises(ConfigError, match="PyTorch's loop has SGD only"):
        parity_yolov5.pytorch(run, tmp_path / "torch.safetensors")


def test_a_folder_that_is_no_run_of_yolov5_is_named(tmp_path, capsys):
    assert parity.main(["yolov5", str(tmp_path / "missing"), "--json", str(tmp_path / "out.json")]) == 2
    assert "missing" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_runs_of_yolov5_that_are_too_far_apart_are_counted():
    assert "2 pairs are more than 0.05 apart" in parity_yolov5.table({"mAP50": {"fp32": 0.8, "PyTorch": 0.7}, "failed": 2})


def test_a_comparison_that_is_not_there_names_those_that_are(capsys):
    assert parity.main(["yolo"]) == 2
    assert "mnist, cifar, resnet50" in capsys.readouterr().err


def test_losses_are_judged_beside_jax_jit_in_the_same_policy_and_beside_pytorch():
    exact = np.array([3.0, 2.0, 1.0])
    runs = {
        "fp32": exact * (1 + 1e-6), "mixed": exact * 1.5, "jax.jit": exact, "PyTorch": exact * (1 + np.array([0, 0, 2e-3])),
        "jax.jit mixed": exact * 1.5,
    }  # fmt: skip
    apart = losses_beside.differences(runs)
    assert list(apart)[-1] == "mixed - jax.jit mixed"
    assert apart["jax.jit - PyTorch"] == {"largest": pytest.approx(2e-3, rel=1e-2), "at_step": 3}
    assert [losses_beside.bounds_failed(apart, bound) for bound in (3e-3, 1e-3)] == [0, 1]
    cases = {
        "fp32": ((exact * (1 + 2e-5), 1), (exact * (1 - 3e-3), 2), (np.full(3, np.nan), 2)),
        "mixed": ((exact, 1), (exact * np.nan, 1)),
    }
    for policy, worse in cases.items():
        for losses, failed in worse:
            assert losses_beside.bounds_failed(losses_beside.differences(runs | {policy: losses}), 3e-3) == failed


def _unreadable() -> int:
    raise TpuflowError("no data here")


def _stopped() -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("publish", "status", "said"),
    [(lambda: 1, 1, ""), (_unreadable, 2, "error: no data here\n"), (_stopped, 130, "interrupted: out.json is not written\n")],
)
def test_a_comparison_that_cannot_finish_says_so_and_not_by_a_traceback(publish, status, said, capsys):
    assert exit_status(publish, Path("out.json")) == status
    assert capsys.readouterr().err == said


def test_figures_are_written_as_json_before_they_are_judged(tmp_path, capsys):
    figures = {"failed": 3, "losses": [0.5, float("nan")]}
    assert judged(figures, lambda figures: f"{figures['failed']} bounds fail", tmp_path / "out.json") == 1
    assert (
        json.loads((tmp_path / "out.json").read_text()) == {"failed": 3, "losses": [0.5, "nan"]}
        and capsys.readouterr().out == "3 bounds fail\n"
    )
