"""Convolutions: training steps of three networks beside plain jax.jit and PyTorch, and the three products of single layers in a loop.

`python -m bench.conv --json bench/results/conv.json` prints medians of interleaved runs. The small networks take many steps in one
launch (jax: `lax.scan`), ResNet-50 one step a launch; every contender starts from the same values and does SGD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tpuflow
from bench.timing import interleaved, medians, publish
from models.cifar_net import CifarNet
from models.lenet import LeNet5
from models.resnet import resnet50
from tpuflow.device.fast.engine import COMPILER_OPTIONS

RATE = 1e-3
ROUNDS = 5

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Network:
    """A network to train: Flax module, shape of a batch, steps a launch, and its PyTorch twin by name."""

    model: Any
    images: tuple[int, ...]
    steps: int
    twin: str


NETWORKS: Mapping[str, Network] = {
    "LeNet-5, batch 32": Network(LeNet5(), (32, 32, 32, 1), 50, "lenet"),
    "CIFAR-10 network, batch 4": Network(CifarNet(), (4, 32, 32, 3), 100, "cifar"),
    "ResNet-50, batch 4, 224": Network(resnet50(), (4, 224, 224, 3), 1, "resnet50"),
}


def _step(network: Network) -> tuple[Callable[..., Any], Any]:
    """(one step of SGD over (variables, images, labels), initial variables)."""
    options = {"train": True} if network.twin == "resnet50" else {}
    variables = network.model.init(jax.random.key(0), np.zeros(network.images, np.float32))

    def loss(params: Any, rest: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        logits, changed = network.model.apply({**rest, "params": params}, images, mutable=list(rest), **options)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -picked.mean(), changed

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        rest = {k: v for k, v in state.items() if k != "params"}
        (value, changed), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"], rest, *batch)
        return {**changed, "params": jax.tree.map(lambda p, g: p - RATE * g, state["params"], gradient)}, value

    return step, variables


def _batches(network: Network) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((network.steps, *network.images), np.float32)
    return images, rng.integers(0, 10, images.shape[:2]).astype(np.int32)


def _torch(network: Network) -> Run:
    import torch

    from train import torch_models

    small = functools.partial(torch_models.SmallNet, network.images[-1], conv_bias=network.twin == "cifar")
    model = (
        torch_models.ResNet((3, 4, 6, 3), bottleneck=True, classes=10, even=True, epsilon=1e-5) if network.twin == "resnet50" else small()
    )
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=RATE), torch.nn.CrossEntropyLoss()
    images, labels = _batches(network)
    x, y = torch.from_numpy(np.moveaxis(images, -1, 2).copy()), torch.from_numpy(labels.astype(np.int64))

    def run() -> None:
        for i in range(network.steps):
            optimizer.zero_grad()
            loss(model(x[i]), y[i]).backward()
            optimizer.step()

    return run


def contenders(network: Network) -> dict[str, Run]:
    """Every contender's launch of the network's steps."""
    step, variables = _step(network)
    batches = _batches(network)

    def many(state: Any, xs: Any) -> Any:
        return lax.scan(step, state, xs) if network.steps > 1 else step(state, jax.tree.map(lambda x: x[0], xs))

    ours = tpuflow.jit(many)
    same, plain = jax.jit(many, compiler_options=COMPILER_OPTIONS), jax.jit(many)
    runs: dict[str, Callable[..., Any]] = {"tpuflow": ours, "jax.jit, the device's options": same, "jax.jit": plain}
    on_host = jax.device_put((variables, batches))
    return {name: functools.partial(_finished, run, *on_host) for name, run in runs.items()} | {"PyTorch": _torch(network)}


def _finished(run: Callable[..., Any], *arguments: Any) -> None:
    jax.block_until_ready(run(*arguments))


LAYERS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], int, str]] = {  # images, kernel, stride, padding
    "LeNet-5 conv1": ((32, 32, 32, 1), (5, 5, 1, 6), 1, "VALID"),
    "LeNet-5 conv2": ((32, 14, 14, 6), (5, 5, 6, 16), 1, "VALID"),
    "ResNet-50 7x7/2": ((4, 224, 224, 3), (7, 7, 3, 64), 2, "SAME"),
    "ResNet-50 3x3, 56": ((4, 56, 56, 64), (3, 3, 64, 64), 1, "SAME"),
    "ResNet-50 3x3/2, 56": ((4, 56, 56, 128), (3, 3, 128, 128), 2, "SAME"),
    "ResNet-50 1x1/2, 56": ((4, 56, 56, 256), (1, 1, 256, 512), 2, "SAME"),
    "ResNet-50 3x3, 7": ((4, 7, 7, 512), (3, 3, 512, 512), 1, "SAME"),
}


def _layer(name: str) -> dict[str, Run]:
    """One layer forward and backward, four times in a loop: tpuflow and jax.jit."""
    shape, kernel, stride, padding = LAYERS[name]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(shape, np.float32), rng.standard_normal(kernel, np.float32)

    def body(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        out, pull = jax.vjp(
            lambda x, w: lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")), *state
        )
        dx, dw = pull(out * 1e-3)
        return (state[0] - dx * 1e-6, state[1] - dw * 1e-6), None

    def loop(x: Any, w: Any) -> Any:
        return lax.scan(body, (x, w), length=4)[0]

    return {"tpuflow": functools.partial(_finished, tpuflow.jit(loop), x, w), "jax.jit": functools.partial(_finished, jax.jit(loop), x, w)}


def measure(rounds: int = ROUNDS) -> tuple[str, Mapping[str, Any]]:
    """Milliseconds a step of every network, and four forward and backward passes of every layer."""
    lines, figures = [], {}
    for name, network in NETWORKS.items():
        taken = {k: 1e3 * v / network.steps for k, v in medians(interleaved(contenders(network), rounds)).items()}
        figures[name] = taken
        lines.append(_line(name, taken))
    for name in LAYERS:
        figures[name] = {k: 1e3 * v for k, v in medians(interleaved(_layer(name), rounds)).items()}
        lines.append(_line(name, figures[name]))
    return "\n".join(lines), {"milliseconds": figures}


def _line(name: str, taken: Mapping[str, float]) -> str:
    return f"{name:<28}" + "  ".join(f"{k} {v:.2f} ms" for k, v in taken.items())


if __name__ == "__main__":
    publish(__doc__, measure)
