"""The UNet of Stable Diffusion in full size beside diffusers' own: `python -m train.parity unet`, forward and one backward pass.

Both get the same random weights, which each draws by the tensors' names, one process after the other: memory is needed for the weights and
their gradients, 3.4 GB each, and as much again for what is between; PyTorch's gradients wait on disk. Blocks are checkpointed in both.
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
from train.torch_packages import import_package

CONFIGS: Mapping[str, Config] = {"tiny": TINY, **{name.rpartition("/")[2]: config for name, config in SIZES.items()}}
TEXT_LENGTH = 77
TIMESTEP = 500
RESULTS = "results.npz"

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


def theirs(config: Config, folder: Path) -> None:
    """Write what PyTorch finds: the loss, the outputs, and for each of our leaves its gradient."""
    diffusers = import_package("diffusers")
    import torch

    network: Any = diffusers.UNet2DConditionModel.from_config(config.to_json())
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
    np.savez(folder / RESULTS, outputs=outputs.detach().numpy().transpose(0, 2, 3, 1), loss=loss.item(), seconds=seconds)
    gradients = dict(network.named_parameters())
    for path, (name, source) in tensors(PARTS["unet"].variables_like(config)).items():
        np.save(_file(folder, path), source.to_flax(gradients.pop(name).grad.numpy()))
    assert not gradients, f"no leaf takes {', '.join(gradients)}"


def variables(config: Config) -> Any:
    """The same weights for our model, tensor after tensor: a state dict of them all would be as much again."""
    like = PARTS["unet"].variables_like(config)
    table = tensors(like)

    def leaf(path: Any, shape: Any) -> jax.Array:
        name, source = table[_path(path)]
        theirs = source.to_torch(np.broadcast_to(np.float32(0), shape.shape)).shape
        return jnp.asarray(source.to_flax(drawn(name, theirs)))

    return jax.tree_util.tree_map_with_path(leaf, like)


def step(config: Config) -> Any:
    """A function of (variables, latents, timestep, text, noise): ((loss, outputs), gradients)."""
    model = UNet2DConditionModel(replace(config, gradient_checkpointing=True))

    def loss(variables: Any, latents: Any, timestep: Any, text: Any, noise: Any) -> Any:
        outputs = model.apply(variables, latents, timestep, text)
        return jnp.mean(jnp.square(outputs - noise)), outputs

    return jax.value_and_grad(loss, has_aux=True)


def differences(config: Config, folder: Path, chip: str) -> Iterator[tuple[str, float, float]]:
    """(what, our relative difference from PyTorch's, the bound)."""
    arrays = inputs(config)
    start = time.perf_counter()
    compiled = tpuflow.jit(step(config), chip=chip).lower(PARTS["unet"].variables_like(config), *arrays).compile()
    print(f"compiled in {time.perf_counter() - start:.1f} s; modelled on {chip}: {compiled.time().seconds:.3f} s", flush=True)
    print(compiled.memory_analysis(), flush=True)
    given, start = variables(config), time.perf_counter()
    (loss, outputs), gradients = jax.block_until_ready(compiled(given, *arrays))
    with np.load(folder / RESULTS) as expected:
        print(f"ran in {time.perf_counter() - start:.1f} s, PyTorch in {expected['seconds']:.1f} s", flush=True)
        yield "loss", abs(float(loss) / float(expected["loss"]) - 1), LOSS_BOUND
        yield "outputs", _apart(outputs, expected["outputs"]), OUTPUT_BOUND
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    yield "gradients", max(_apart(leaf, np.load(_file(folder, _path(path)), mmap_mode="r")) for path, leaf in leaves), GRADIENT_BOUND


def _apart(found: Any, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _file(folder: Path, path: str) -> Path:
    return folder / f"{path.replace('/', '.')}.npy"


def main(argv: Sequence[str] | None = None) -> int:
    """Run both and print the differences; 0 if all are within their bounds."""
    parser = argparse.ArgumentParser(prog="python -m train.parity unet", description=__doc__)
    parser.add_argument("--size", choices=tuple(CONFIGS), default="stable-diffusion-v1-4", help="[%(default)s]")
    parser.add_argument("--chip", default="generic", help="row of the chip catalogue [%(default)s]")
    parser.add_argument("--write-pytorch", type=Path, metavar="FOLDER", help="only run PyTorch, and keep what it finds there")
    parser.add_argument("--pytorch", type=Path, metavar="FOLDER", help="compare with what was kept there")
    arguments = parser.parse_args(argv)
    config = CONFIGS[arguments.size]
    if arguments.write_pytorch:
        theirs(config, arguments.write_pytorch)
        return 0
    if arguments.pytorch:
        return _reported(differences(config, arguments.pytorch, arguments.chip))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "train.parity_unet", "--size", arguments.size, "--write-pytorch", folder], check=True)
        return _reported(differences(config, Path(folder), arguments.chip))


def _reported(found: Iterator[tuple[str, float, float]]) -> int:
    within = True
    for what, difference, bound in found:
        within &= difference <= bound
        print(f"{what:<10} differ by {difference:.2e} (at most {bound:.0e})", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
