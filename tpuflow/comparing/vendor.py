"""Ahead-of-time compilation of a step by XLA:TPU, from the package libtpu, which the user installs; it needs no TPU."""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpuflow.chips import Chip
from tpuflow.comparing.hlo import Module, parse
from tpuflow.comparing.trips import with_trips
from tpuflow.errors import ConfigError
from tpuflow.jaxprs.shardings import Cut

PACKAGE = "libtpu"
DUMPED = ".after_codegen.txt"
"""The end of the name of the dump with the scheduled module, windows and cycles included. `as_text` fails where a part is given to a
SparseCore: jaxlib cannot read that back."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice of a chip's generation by libtpu's name ("v5e:2x2"), and how many of its devices are a chip: of two, each is a core."""

    name: str
    devices_a_chip: int = 1


@dataclass(frozen=True, slots=True)
class Generation:
    """The slices of a generation that can be asked for, by their devices, and how many of these are a chip."""

    name: str
    slices: Mapping[int, str]
    devices_a_chip: int = 1


_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
_FLAT_CORES, _CUBE_CORES = ({2 * chips: name for chips, name in names.items()} for names in (_FLAT, _CUBES))
GENERATIONS: Mapping[str, Generation] = {
    "tpu-v2": Generation("v2", _FLAT_CORES, 2),
    "tpu-v3": Generation("v3", _FLAT_CORES, 2),
    "tpu-v4": Generation("v4", _CUBE_CORES, 2),
    "tpu-v5e": Generation("v5e", _FLAT),
    "tpu-v5p": Generation("v5p", _CUBES),
    "tpu-v6e": Generation("v6e", _FLAT),
    "tpu-v7x": Generation("tpu7x", _CUBE_CORES, 2),
}
"""By the names of our rows."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA:TPU made of a step: its scheduled HLO, the bytes of its arguments and temporaries in HBM, and what it was compiled for."""

    module: Module
    argument_bytes: int
    temp_bytes: int
    topology: Topology


def topology_of(chip: Chip, devices: int = 1) -> Topology:
    """The slice of a row of ours, among the vendor's, that has so many devices; the smallest, of which one device is taken, for one.

    Raises:
      ConfigError: the compiler does not know the chip or has no such slice of it, or is not installed.
    """
    if chip.name not in GENERATIONS:
        raise ConfigError(f"chip {chip.name!r}: XLA:TPU compiles for {', '.join(GENERATIONS)}. Name one of them.")
    known = GENERATIONS[chip.name]
    wanted = min(known.slices) if devices == 1 else devices
    if wanted not in known.slices:
        sizes = ", ".join(map(str, known.slices))
        raise ConfigError(
            f"chip {chip.name!r}: XLA:TPU has slices of {sizes} devices, and a mesh of {devices}. Give it one of these sizes."
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"comparing needs XLA:TPU's compiler, which is in the package {PACKAGE}: pip install {PACKAGE}. It is Google's, under terms of "
            "its own, and needs no TPU to compile."
        )
    return Topology(f"{known.name}:{known.slices[wanted]}", known.devices_a_chip)


@dataclass(frozen=True, slots=True)
class Placed:
    """The axes of a mesh with their sizes, and the shardings of the leaves of arguments and results: for each dimension the names of axes.
    Without a mesh everything is on one device."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    arguments: tuple[Cut, ...] = ()
    results: tuple[Cut, ...] = ()

    @property
    def devices(self) -> int:
        """All of the mesh."""
        return math.prod(self.mesh.values())


ONE_DEVICE = Placed()


def compile_ahead(
    fun: Callable[..., Any], arguments: Any, chip: Chip, placed: Placed = ONE_DEVICE, donate_argnums: tuple[int, ...] = ()
) -> Compiled:
    """Compile a function for one device of the chip, or a mesh of them, from the shapes of its arguments.

    Raises:
      ConfigError: libtpu is missing, does not know the chip, or cannot compile the function (with what it says).
    """
    from jax.experimental import topologies

    found = topology_of(chip, placed.devices)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it looks for a cloud machine's metadata until it gives up
    with tempfile.TemporaryDirectory(prefix="tpuflow-") as folder:
        try:
            topology = topologies.get_topology_desc(platform="tpu", topology_name=found.name)
            lowered = _lowered(fun, arguments, topology, placed, donate_argnums)
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except RuntimeError as error:  # JAX's own errors are such
            raise ConfigError(f"XLA:TPU does not compile this for {found.name}: {str(error).strip()}") from error
        texts, memory = [path.read_text() for path in Path(folder).glob(f"*{DUMPED}")], compiled.memory_analysis()
    if len(texts) != 1 or memory is None:
        raise ConfigError(f"XLA:TPU compiled for {found.name}, but the installed {PACKAGE} does not show what; try another version.")
    return Compiled(with_trips(parse(texts[0])), memory.argument_size_in_bytes, memory.temp_size_in_bytes, found)


def _lowered(fun: Callable[..., Any], arguments: Any, topology: Any, placed: Placed, donate_argnums: tuple[int, ...]) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    if not placed.mesh:
        device = jax.sharding.SingleDeviceSharding(topology.devices[0])
        return jax.jit(fun, donate_argnums=donate_argnums).lower(*tree.unflatten([_on(x, device) for x in leaves]))
    from jax.experimental import topologies

    mesh = topologies.make_mesh(topology, tuple(placed.mesh.values()), tuple(placed.mesh))
    given = [_on(x, _cut(mesh, cut)) for x, cut in zip(leaves, placed.arguments, strict=True)]
    results = jax.tree.structure(jax.eval_shape(fun, *arguments)).unflatten([_cut(mesh, cut) for cut in placed.results])
    return jax.jit(fun, donate_argnums=donate_argnums, out_shardings=results).lower(*tree.unflatten(given))


def _cut(mesh: Any, cut: Cut) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(names or None for names in cut)))


def _on(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if hasattr(x, "shape") else x
