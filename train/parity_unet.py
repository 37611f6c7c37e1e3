"""The UNet of Stable Diffusion in full size beside diffusers' own: `python -m train.parity unet`, forward and one backward pass.

Both get the same random weights, which each draws by the tensors' names, one process after the other: 3.4 GB at a time. Of gradients each
keeps, for every tensor, its largest element and some thousand of its elements, evenly spaced. Blocks are checkpointed in both.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import tpuflow
from models.diffusers_configs import torch_layers
from models.unet_2d_condition import SIZES, TINY, Config, UNet2DConditionModel
from tpuflow.importers.places import Source, rows, sources, spellings
from train.diffusion.folders import PARTS

CONFIGS: Mapping[str, Config] = {"tiny": TINY, **{name.rpartition("/")[2]: config for name, config in SIZES.items()}}
TEXT_LENGTH = 77
TIMESTEP = 500
KEPT_ELEMENTS = 4096
"""Of each tensor's gradient."""

OUTPUT_BOUND, LOSS_BOUND, GRADIENT_BOUND = 1e-4, 1e-5, 1e-3
"""Relative differences in fp32: of outputs and gradients to their largest elements."""


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """The weights of one tensor, which keep a signal's variance: fp32, from its name alone."""
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape), dtype=np.float32)
    if len(shape) == 1:
        return np.float32(0.1) * normal + np.float32("norm" in name and name.endswith("weight"))
    return np.float32(np.prod(shape[1:]) ** -0.5) * normal


def inputs(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Latents [1, H, W, C], a timestep [1], a text [1, S, E], and the noise that is to be found [1, H, W, C]."""
    side, rng = config.sample_size or config.reduction, np.random.default_rng(0)
    latents, noise = rng.standard_normal((2, 1, side, side, config.in_channels), dtype=np.float32)
    text = rng.standard_normal((1, TEXT_LENGTH, config.cross_attention_dim), dtype=np.float32)
    return latents, np.array([TIMESTEP], np.int32), text, noise


def tensors(like: Any) -> dict[str, tuple[str, Source]]:
    """Path of a leaf -> its tensor's name, and how their axes become each other's."""
    table, found = rows(torch_layers(like)), {}
    for path, _ in jax.tree_util.tree_leaves_with_path(like):
        source = sources(tuple(key.key for key in path), table)[0]
        found[_path(path)] = next(spellings(source.name)), source
    return found


def spaced(count: int) -> slice:
    """Which of so many elements are kept."""
    return slice(0, None, -(-count // KEPT_ELEMENTS))


def theirs(config: Config, file: Path) -> None:
    """Write what PyTorch finds: the outputs, the loss, and for each of our leaves what is kept of its gradient."""
    import diffusers
    import torch

    network = diffusers.UNet2DConditionModel.from_config(config.to_json())
    network.enable_gradient_checkpointing()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(name, parameter.shape)))
    latents, timestep, text, noise = inputs(config)
    images = [torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2))) for array in (latents, noise)]
    start = time.perf_counter()
    outputs = network.train()(images[0], torch.from_numpy(timestep), torch.from_numpy(text)).sample
    loss = torch.mean(torch.square(outputs - images[1]))
    loss.backward()
    seconds = time.perf_counter() - start
    found: dict[str, np.ndarray] = {}
    gradients = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    for path, (name, source) in tensors(PARTS["unet"].variables_like(config)).items():
        flat = source.to_flax(gradients.pop(name)).reshape(-1)
        found |= {f"{path}:elements": flat[spaced(flat.size)], f"{path}:largest": np.abs(flat).max()}
    assert not gradients, f"no leaf takes {', '.join(gradients)}"
    np.savez(file, outputs=outputs.detach().numpy().transpose(0, 2, 3, 1), loss=loss.item(), seconds=seconds, **found)


def variables(config: Config) -> Any:
    """The same weights for our model, tensor after tensor: a state dict of them all would be as much again."""
    like = PARTS["unet"].variables_like(config)
    table = tensors(like)

    def leaf(path: Any, shape: Any) -> np.ndarray:
        name, source = table[_path(path)]
        theirs = source.to_torch(np.broadcast_to(np.float32(0), shape.shape)).shape
        return np.ascontiguousarray(source.to_flax(drawn(name, theirs)))

    return jax.tree_util.tree_map_with_path(leaf, like)


def step(config: Config) -> Any:
    """A function of (variables, latents, timestep, text, noise): (loss, outputs, what is kept of each gradient)."""
    model = UNet2DConditionModel(replace(config, gradient_checkpointing=True))

    def loss(variables: Any, latents: Any, timestep: Any, text: Any, noise: Any) -> Any:
        outputs = model.apply(variables, latents, timestep, text)
        return jnp.mean(jnp.square(outputs - noise)), outputs

    def kept(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = gradient.reshape(-1)
        return flat[spaced(flat.size)], jnp.abs(flat).max()

    def both(variables: Any, *arrays: Any) -> Any:
        (value, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(variables, *arrays)
        return value, outputs, jax.tree.map(kept, gradients)

    return both


def differences(config: Config, file: Path, chip: str) -> Iterator[tuple[str, float, float]]:
    """(what, our relative difference from PyTorch's, the bound)."""
    arrays = inputs(config)
    shapes = PARTS["unet"].variables_like(config)
    start = time.perf_counter()
    compiled = tpuflow.jit(step(config), chip=chip).lower(shapes, *arrays).compile()
    print(f"compiled in {time.perf_counter() - start:.1f} s; modelled on {chip}: {compiled.time().seconds:.3f} s", flush=True)
    print(compiled.memory_analysis(), flush=True)
    given, start = variables(config), time.perf_counter()
    loss, outputs, gradients = jax.block_until_ready(compiled(given, *arrays))
    with np.load(file) as expected:
        print(f"ran in {time.perf_counter() - start:.1f} s, PyTorch in {expected['seconds']:.1f} s", flush=True)
        yield "loss", abs(float(loss) / float(expected["loss"]) - 1), LOSS_BOUND
        largest = np.abs(expected["outputs"]).max()
        yield "outputs", float(np.abs(outputs - expected["outputs"]).max() / largest), OUTPUT_BOUND
        yield "gradients", max(_gradient_differences(gradients, expected)), GRADIENT_BOUND


def _gradient_differences(gradients: Any, expected: Any) -> Iterator[float]:
    """Of every tensor's kept elements and of its largest one, relative to the largest one."""
    for path, (elements, largest) in jax.tree_util.tree_leaves_with_path(gradients, is_leaf=lambda node: isinstance(node, tuple)):
        scale = float(expected[f"{_path(path)}:largest"])
        yield float(np.abs(elements - expected[f"{_path(path)}:elements"]).max()) / scale
        yield abs(float(largest) - scale) / scale


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def main(argv: Sequence[str] | None = None) -> int:
    """Run both and print the differences; 0 if all are within their bounds."""
    parser = argparse.ArgumentParser(prog="python -m train.parity unet", description=__doc__)
    parser.add_argument("--size", choices=tuple(CONFIGS), default="stable-diffusion-v1-4", help="[%(default)s]")
    parser.add_argument("--chip", default="generic", help="row of the chip catalogue [%(default)s]")
    parser.add_argument("--write-pytorch", type=Path, metavar="FILE", help="only run PyTorch, and write what it finds")
    arguments = parser.parse_args(argv)
    config = CONFIGS[arguments.size]
    if arguments.write_pytorch:
        theirs(config, arguments.write_pytorch)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pytorch.npz"
        subprocess.run([sys.executable, "-m", "train.parity_unet", "--size", arguments.size, "--write-pytorch", str(file)], check=True)
        return _reported(differences(config, file, arguments.chip))


def _reported(found: Iterator[tuple[str, float, float]]) -> int:
    within = True
    for what, difference, bound in found:
        within &= difference <= bound
        print(f"{what:<10} differ by {difference:.2e} (at most {bound:.0e})", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
