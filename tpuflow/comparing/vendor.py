"""XLA:TPU's own compile of a step, ahead of time and without a TPU, where the user has installed libtpu."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tpuflow.chips import Chip
from tpuflow.comparing.hlo import Module, parse
from tpuflow.errors import ConfigError

PACKAGE = "libtpu"


@dataclass(frozen=True, slots=True)
class Slice:
    """The smallest slice of a chip's generation that can be asked for, and how many of its devices are a chip: where there are two, each is
    one of its cores."""

    topology: str
    devices_a_chip: int = 1


SLICES: Mapping[str, Slice] = {
    "tpu-v2": Slice("v2:2x2", 2),
    "tpu-v3": Slice("v3:2x2", 2),
    "tpu-v4": Slice("v4:2x2x1", 2),
    "tpu-v5e": Slice("v5e:2x2"),
    "tpu-v5p": Slice("v5p:2x2x1"),
    "tpu-v6e": Slice("v6e:2x2"),
    "tpu-v7x": Slice("tpu7x:2x2x1", 2),
}
"""By the names of our rows."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA:TPU made of a step: its scheduled HLO, the bytes of its arguments and temporaries in HBM, and what it was compiled for."""

    module: Module
    argument_bytes: int
    temp_bytes: int
    slice: Slice


def slice_of(chip: Chip) -> Slice:
    """What a row of ours is among the vendor's.

    Raises:
      ConfigError: the compiler does not know the chip, or is not installed.
    """
    if chip.name not in SLICES:
        raise ConfigError(f"chip {chip.name!r}: XLA:TPU compiles for {', '.join(SLICES)}. Name one of them.")
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"comparing needs XLA:TPU's compiler, which is in the package {PACKAGE}: pip install {PACKAGE}. It is Google's, under terms of "
            "its own, and needs no TPU to compile."
        )
    return SLICES[chip.name]


def compile_ahead(fun: Callable[..., Any], arguments: Any, chip: Chip, donate_argnums: tuple[int, ...] = ()) -> Compiled:
    """Compile a function of one device for one device of the chip, from the shapes of its arguments.

    Raises:
      ConfigError: libtpu is missing, does not know the chip, or cannot compile the function (with what it says).
    """
    from jax.experimental import topologies

    found = slice_of(chip)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it looks for a cloud machine's metadata until it gives up
    try:
        device = topologies.get_topology_desc(platform="tpu", topology_name=found.topology).devices[0]
        placed = jax.tree.map(lambda x: _on(x, jax.sharding.SingleDeviceSharding(device)), arguments)
        compiled = jax.jit(fun, donate_argnums=donate_argnums).lower(*placed).compile()
    except RuntimeError as error:  # JAX's own errors are such
        raise ConfigError(f"XLA:TPU does not compile this for {found.topology}: {str(error).strip()}") from error
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise ConfigError(f"XLA:TPU compiled for {found.topology}, but the installed {PACKAGE} does not show what; try another version.")
    return Compiled(parse(text), memory.argument_size_in_bytes, memory.temp_size_in_bytes, found)


def _on(x: Any, sharding: Any) -> Any:
    if not hasattr(x, "shape"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
