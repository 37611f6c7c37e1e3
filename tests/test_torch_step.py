"""Whole steps of PyTorch modules: forward, backward and update as one Program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import tpuflow

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.torch_beside import CLOSE, assert_close  # noqa: E402
from tpuflow.errors import ConfigError, UnsupportedPrimitiveError  # noqa: E402
from tpuflow.torch import train_step  # noqa: E402

pytestmark = pytest.mark.torch


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4))


def grouped(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda m: kind(
        [{"params": [m[0].weight], "lr": 3e-2}, {"params": [m[1].weight, m[3].weight, m[3].bias], "weight_decay": 0.1}], **options
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-nesterov": grouped(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-dampened": grouped(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1e-2),
    "adam": grouped(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.99)),
    "adam-amsgrad": grouped(torch.optim.Adam, lr=1e-2, amsgrad=True, maximize=True),
    "adamw": grouped(torch.optim.AdamW, lr=1e-2),
}
X, Y = np.random.default_rng(0).standard_normal((40, 6), np.float32), np.arange(40) % 4


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_pytorchs_and_can_go_on_from_its_optimizer(name):
    model, plain = small(), small()
    theirs, ours = OPTIMIZERS[name](plain), OPTIMIZERS[name](model)
    losses = []
    for at in range(0, 40, 8):
        loss = F.cross_entropy(plain(torch.from_numpy(X[at : at + 8])), torch.from_numpy(Y[at : at + 8]))
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        losses.append(loss.item())
    found = []
    for begin, end in ((0, 3), (3, 5)):  # in two stretches, from and to the module and the optimizer
        step = train_step(model, nn.CrossEntropyLoss(), ours)
        state, run = step.state, jax.jit(step)
        for at in range(8 * begin, 8 * end, 8):
            state, metrics = run(state, (X[at : at + 8], Y[at : at + 8]))
            found.append(float(metrics["loss"]))
        step.load_into(state)
    assert found == pytest.approx(losses, rel=CLOSE)
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_close(a, b)
    kept, expected = (optimizer.state_dict()["state"] for optimizer in (ours, theirs))
    for parameter, slots in expected.items():
        for slot, value in slots.items():
            assert_close(kept.get(parameter, {}).get(slot), value, f"{parameter}: {slot}")


@pytest.mark.slow
def test_a_step_takes_sinks_estimates_checks_and_files_like_any_other(tmp_path):
    model = small()
    step = train_step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    results = [tpuflow.train(step, (X, Y), state=step.state, batch_size=8, sink_size=size, progress=False) for size in (0, -1)]
    assert results[0].history[0]["losses"] == results[1].history[0]["losses"]
    assert results[1].round_trips == 1 and len(results[1].history[0]["losses"]) == 5
    batch = (X[:8], Y[:8].astype(np.int32))
    estimate = tpuflow.estimate(step, step.state, batch, chip="tpu-v3")
    assert estimate.fits and estimate.step_seconds > 0
    assert tpuflow.check(step, step.state, batch, chip="tpu-v3", compare=()).ok
    made = tpuflow.jit(step).lower(step.state, batch).compile()
    made.executable.save(tmp_path / "step.tpx")
    expected = jax.tree.leaves(made(step.state, batch))
    outputs, _ = tpuflow.Executable.load(tmp_path / "step.tpx").launch([np.asarray(leaf) for leaf in jax.tree.leaves((step.state, batch))])
    assert all(np.array_equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kept"), [("mixed", "float32"), ("bf16", "bfloat16")])
def test_a_policy_gives_types_and_a_loss_scale(policy, kept):
    model = small()
    step = train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy=policy)
    assert {str(p.dtype) for p in step.state["params"].values()} == {kept}
    state, run, losses = step.state, jax.jit(step), []
    for _ in range(20):
        state, metrics = run(state, (X[:8], Y[:8]))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    step.load_into(state)
    assert model[0].weight.dtype == torch.float32


class Tied(nn.Module):
    """An embedding that is the output layer too, a part that is not trained, dropout; called by keywords."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle, self.out = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.out.weight = self.embedding.weight
        self.middle.requires_grad_(False)

    def forward(self, ids: Any, labels: Any = None) -> Any:
        return self.out(F.dropout(self.middle(self.embedding(ids)), 0.5, self.training))


@pytest.mark.slow
def test_tied_and_frozen_parameters_and_dropout_in_a_step():
    model = Tied()
    loss = lambda outputs, batch: F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())  # noqa: E731
    step = train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), seed=7)
    assert set(step.state["params"]) == {"embedding.weight", "middle.weight", "middle.bias"}
    batch = {"ids": np.arange(8).reshape(2, 4), "labels": np.arange(8).reshape(2, 4)}
    run = jax.jit(step)
    state, first = run(step.state, batch)
    assert (
        float(run(step.state, batch)[1]["loss"])
        == float(first["loss"])
        != float(run({**step.state, "key": state["key"]}, batch)[1]["loss"])
    )
    assert np.array_equal(state["params"]["middle.weight"], step.state["params"]["middle.weight"])
    model.eval()
    still = train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = loss(model(torch.arange(8).view(2, 4)), {"labels": torch.arange(8).view(2, 4)})
    expected.backward()
    after, metrics = jax.jit(still)(still.state, batch)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=CLOSE)
    change = (torch.from_numpy(np.asarray(after["params"]["embedding.weight"])) - model.embedding.weight.detach()) / -0.1
    assert_close(change, model.embedding.weight.grad, close=1e-4)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda m: train_step(lambda x: x, nn.MSELoss(), None), "torch.nn.Module"),
        (lambda m: train_step(m, "mse", torch.optim.SGD(m.parameters())), "loss must be a function"),
        (lambda m: train_step(m, nn.MSELoss(), torch.optim.Rprop(m.parameters())), "torch.optim.AdamW.*Rprop"),
        (lambda m: train_step(m, nn.MSELoss(), torch.optim.SGD(small().parameters())), "does not have"),
        (lambda m: train_step(m, lambda o, t: o, torch.optim.SGD(m.parameters())), "batches"),
    ],
)
def test_a_wrong_argument_of_a_step_is_named(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        made = make(small())
        made(made.state, X)


def test_a_model_that_asks_for_values_is_refused_as_a_step_and_told_what_to_do():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, x: Any) -> Any:
            return x * self.w if x.sum() > 0 else x - self.w

    model = Asking()
    step = train_step(model, F.mse_loss, torch.optim.SGD(model.parameters()))
    with pytest.raises(UnsupportedPrimitiveError, match="torch.where.*torch.compile"):
        step(step.state, (X, X))
