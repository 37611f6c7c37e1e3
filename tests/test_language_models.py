"""Language models compute what transformers' PyTorch models compute: losses, gradients, parameters after training; weights go both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tpuflow
from tests.language_models import PAIRS, Pair, state_of, to_torch
from tpuflow.importers import save_state_dict, state_dict

LOSS = 2e-6
"""Relative: fp32 sums in another order than PyTorch's."""
GRADIENT = 1e-4
"""Of each tensor's largest element."""
STEPS, RATE, DECAY = 20, 1e-3, 0.01
ADAMW = 1e-4
"""Of each tensor's largest element after 20 steps of AdamW; measured: 2e-5."""
KEY_BIASES = 2e-2
"""The same of biases of keys: their gradients are rounding, which AdamW scales to steps like any other; measured: 4e-3."""


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param]


def batch_of(pair: Pair, seed: int = 1) -> dict[str, np.ndarray]:
    return pair.batch(pair.config, np.random.default_rng(seed))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_close(pair: Pair, ours: Any, theirs: Any, bound: Callable[[str], float]) -> None:
    """Every element within a bound of its tensor's largest; of one that is 0 but for rounding, within that of one like it.

    A bias of keys adds the same to all scores of a query, which softmax does not see.
    """
    ours, theirs = by_path(ours), by_path(theirs)
    assert ours.keys() == theirs.keys()
    for path, other in theirs.items():
        like = next((path.removesuffix(end) + instead for end, instead in pair.vanishing if path.endswith(end)), path)
        scale = np.abs(theirs[like]).max()
        np.testing.assert_allclose(ours[path] / scale, other / scale, rtol=0, atol=bound(path), err_msg=path)


@pytest.mark.torch
def test_the_device_gives_the_loss_and_gradients_of_pytorch(torch, transformers, pair):
    twin, batch = pair.twin(transformers, torch), batch_of(pair)
    params = pair.variables(state_of(twin))["params"]
    loss = twin(**to_torch(torch, batch)).loss
    loss.backward()
    theirs = pair.variables({name: parameter.grad.numpy() for name, parameter in twin.named_parameters()})["params"]
    ours, gradients = tpuflow.jit(jax.value_and_grad(lambda p: pair.loss_of(p, batch)))(params)
    assert float(ours) == pytest.approx(loss.item(), rel=LOSS)
    assert_close(pair, gradients, theirs, lambda path: GRADIENT)


@pytest.mark.torch
def test_weights_written_by_us_are_loaded_by_transformers(torch, transformers, pair, tmp_path):
    twin, batch = pair.twin(transformers, torch), batch_of(pair)
    written = state_dict(pair.variables(state_of(twin)), pair.module.torch_layers(pair.config))
    (tmp_path / "config.json").write_text(json.dumps(pair.config.to_json()))
    save_state_dict(tmp_path / "model.safetensors", written)
    loaded, report = getattr(transformers, pair.config.ARCHITECTURE).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    labels = to_torch(torch, batch)
    assert loaded.eval()(**labels).loss.item() == twin(**labels).loss.item()
    assert type(pair.config).from_json(json.loads((tmp_path / "config.json").read_text())).to_json() == pair.config.to_json()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mixtral"])
def test_twenty_steps_of_adamw_end_where_pytorch_ends(torch, transformers, name):
    pair = PAIRS[name]
    twin, batches = pair.twin(transformers, torch), [batch_of(pair, seed) for seed in range(STEPS)]
    params, rule = pair.variables(state_of(twin))["params"], optax.adamw(RATE, weight_decay=DECAY)
    theirs = torch.optim.AdamW(twin.parameters(), lr=RATE, weight_decay=DECAY)
    for batch in batches:
        theirs.zero_grad()
        twin(**to_torch(torch, batch)).loss.backward()
        theirs.step()

    @tpuflow.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = rule.update(jax.grad(pair.loss_of)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = rule.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    ends = pair.variables(state_of(twin))["params"]
    assert_close(pair, params, ends, lambda path: KEY_BIASES if path.endswith(pair.drifting) else ADAMW)
