"""The peers of the MNIST benchmark: plain JAX (one scan an epoch, one call a step) and PyTorch on the CPU.

Each function trains `EPOCHS` epochs with an evaluation after each, and returns (seconds of the training launches alone, last accuracy).
The JAX peers run the very step function that tpuflow compiles, so arithmetic and operations are the same.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tpuflow.device.fast.engine import COMPILER_OPTIONS

EPOCHS, BATCH = 5, 64
LEARNING_RATE = 1e-3
# XLA's simplifier changes results (docs/numerics.md): the peer computes what the device computes, with the device's own options.
SAME_ARITHMETIC = COMPILER_OPTIONS

Arrays = tuple[np.ndarray, np.ndarray]


def _batches(data: Arrays) -> tuple[Arrays, Arrays]:
    """(stacked full batches, the ragged rest)."""
    x, y = data
    full = len(x) // BATCH * BATCH
    return (x[:full].reshape(-1, BATCH, *x.shape[1:]), y[:full].reshape(-1, BATCH)), (x[full:], y[full:])


def step_of(model: Any, data: Arrays, policy: str, optimizer: Any, batch: int, params: Any) -> tuple[Any, Any]:
    """(training step, initial state which may be donated), the very ones that tpuflow.train makes."""
    made = _made(model, data, policy, optimizer, batch, params)
    return made.step, own_copy(made.state)


def _example(policy: str, data: Arrays, params: Any) -> tuple[Any, Any]:
    """(training step with its evaluation, initial state) of the MNIST example."""
    import optax

    from models.mlp import MLP

    made = _made(MLP(), data, policy, optax.sgd(LEARNING_RATE), BATCH, params)
    return made, own_copy(made.state)


def _made(model: Any, data: Arrays, policy: str, optimizer: Any, batch: int, params: Any) -> Any:
    import tpuflow

    first = (data[0][:batch], data[1][:batch])
    return tpuflow.training_step(model, first, policy, optimizer, "softmax_cross_entropy", params=params)


def own_copy(state: Any) -> Any:
    """Arrays that may be donated: no two the same."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.array, state)


def jax_scan(policy: str, train: Arrays, test: Arrays, params: Any) -> tuple[float, float]:
    """jax.jit of a lax.scan over the epoch's full batches, then the ragged one."""
    import jax

    made, state = _example(policy, train, params)
    epoch = jax.jit(lambda s, b: jax.lax.scan(made.step, s, b), donate_argnums=0, compiler_options=SAME_ARITHMETIC)
    step = jax.jit(made.step, donate_argnums=0, compiler_options=SAME_ARITHMETIC)
    evaluate = jax.jit(lambda s, b: jax.lax.map(lambda one: made.evaluate(s, one), b), compiler_options=SAME_ARITHMETIC)
    (full, rest), (test_full, test_rest) = jax.device_put(_batches(train)), jax.device_put(_batches(test))
    test_rest = jax.tree.map(lambda a: a[None], test_rest)
    seconds, hits = 0.0, 0
    for _ in range(EPOCHS):
        start = time.perf_counter()
        state, figures = epoch(state, full)
        state, last = step(state, rest)
        jax.block_until_ready((figures.loss, last.loss))
        seconds += time.perf_counter() - start
        hits = sum(int(np.sum(evaluate(state, b)["accuracy"][0])) for b in (test_full, test_rest))
    return seconds, 100.0 * hits / len(test[0])


def jax_steps(policy: str, train: Arrays, test: Arrays, params: Any) -> tuple[float, float]:
    """One jitted call a step, its loss fetched like a logger does every hundred steps."""
    import jax

    made, state = _example(policy, train, params)
    step = jax.jit(made.step, donate_argnums=0, compiler_options=SAME_ARITHMETIC)
    evaluate = jax.jit(made.evaluate, compiler_options=SAME_ARITHMETIC)

    def pieces(data: Arrays) -> list[Arrays]:
        return [(data[0][i : i + BATCH], data[1][i : i + BATCH]) for i in range(0, len(data[0]), BATCH)]

    seconds, hits = 0.0, 0
    for _ in range(EPOCHS):
        start = time.perf_counter()
        for i, batch in enumerate(pieces(train)):
            state, figures = step(state, batch)
            if i % 100 == 0:
                float(figures.loss)
        jax.block_until_ready(state)
        seconds += time.perf_counter() - start
        hits = sum(int(evaluate(state, b)["accuracy"][0]) for b in pieces(test))
    return seconds, 100.0 * hits / len(test[0])


def torch_steps(policy: str, train: Arrays, test: Arrays, params: Any) -> tuple[float, float]:
    """PyTorch on the CPU, as the documented example trains: fp32, model.half(), or autocast with a GradScaler."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    half = policy == "fp16"
    model = model.half() if half else model
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu") if policy == "mixed" else None
    x, y = torch.from_numpy(train[0]), torch.from_numpy(train[1].astype(np.int64))
    tx, ty = torch.from_numpy(test[0]), torch.from_numpy(test[1].astype(np.int64))
    if policy != "fp32":
        x, tx = x.half(), tx.half()

    def forward(inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
            return model(inputs)

    seconds, hits = 0.0, 0
    for _ in range(EPOCHS):
        start = time.perf_counter()
        for i in range(0, len(x), BATCH):
            loss = loss_fn(forward(x[i : i + BATCH]), y[i : i + BATCH])
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss.float()).backward()
                scaler.step(optimizer)
                scaler.update()
        seconds += time.perf_counter() - start
        with torch.no_grad():
            hits = sum(int((forward(tx[i : i + BATCH]).argmax(1) == ty[i : i + BATCH]).sum()) for i in range(0, len(tx), BATCH))
    return seconds, 100.0 * hits / len(test[0])
