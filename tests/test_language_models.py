"""Language models compute what transformers' PyTorch models compute: losses, gradients, parameters after training; weights go both ways."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

import tpuflow
from tests.language_models import PAIRS, Pair, state_of, to_torch
from tpuflow.importers import save_state_dict, state_dict

LOSS = 2e-6
"""Relative: fp32 sums in another order than PyTorch's."""
GRADIENT = 1e-4
"""Of each tensor's largest element."""
STEPS, RATE = 20, 1e-3


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param]


def batch_of(pair: Pair, seed: int = 1) -> dict[str, np.ndarray]:
    return pair.batch(pair.config, np.random.default_rng(seed))


def assert_gradients_close(ours: Any, theirs: Any) -> None:
    def close(path: Any, one: Any, other: Any) -> None:
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(np.asarray(one) / scale, other / scale, rtol=0, atol=GRADIENT, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, ours, theirs)


@pytest.mark.torch
def test_the_device_gives_the_loss_and_gradients_of_pytorch(torch, transformers, pair):
    twin, batch = pair.twin(transformers, torch), batch_of(pair)
    params = pair.variables(state_of(twin))["params"]
    loss = twin(**to_torch(torch, batch)).loss
    loss.backward()
    theirs = pair.variables({name: parameter.grad.numpy() for name, parameter in twin.named_parameters()})["params"]
    ours, gradients = tpuflow.jit(jax.value_and_grad(lambda p: pair.loss_of(p, batch)))(params)
    assert float(ours) == pytest.approx(loss.item(), rel=LOSS)
    assert_gradients_close(gradients, theirs)


@pytest.mark.torch
def test_weights_written_by_us_are_loaded_by_transformers(torch, transformers, pair, tmp_path):
    twin, batch = pair.twin(transformers, torch), batch_of(pair)
    written = state_dict(pair.variables(state_of(twin)), pair.module.torch_layers(pair.config))
    (tmp_path / "config.json").write_text(json.dumps(pair.config.to_json()))
    save_state_dict(tmp_path / "model.safetensors", written)
    loaded, report = transformers.AutoModelForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(twin)
    assert not any(report.values()), report
    labels = to_torch(torch, batch)
    assert loaded.eval()(**labels).loss.item() == twin(**labels).loss.item()
    assert type(pair.config).from_json(json.loads((tmp_path / "config.json").read_text())).to_json() == pair.config.to_json()
