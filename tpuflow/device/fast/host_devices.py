"""A mesh's chips over several devices of JAX, one of each process of a computation under `jax.distributed`.

Each axis of the mesh is divided into contiguous parts of equal size; a device runs the chips of one part of every axis, as lanes of its
executable (`tpuflow.device.fast.lanes`). Between devices, collectives are JAX's own, over gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuflow.device.fast.host import DEFAULT, REPLICATED, Host, Move, Sizes
from tpuflow.errors import ConfigError
from tpuflow.isa.collectives import MeshAxis, chips_of
from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Program
from tpuflow.jaxprs.processes import check_alike, count, devices, everyones, peers, values


class SpreadHost:
    """The `Host` of a mesh that several devices share. Its arrays are global JAX arrays, of which each device holds its chips' part."""

    takes_compiled = False

    def __init__(self, mesh: Sequence[MeshAxis], devices: Sequence[Any]):
        """Of a mesh and its devices, in their order.

        Raises:
          ConfigError: the mesh's chips do not divide over the devices.
        """
        self.key = tuple(d.id for d in devices)
        parts = parts_of(mesh, len(devices))
        names = [f"devices of mesh axis {n}" for n in range(len(mesh))]
        self.over = Mesh(np.array(devices).reshape(parts), names)
        self._moving: dict[tuple[Move, NamedSharding], Callable[[Any], Any]] = {}

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated."""
        return jax.jit(function, donate_argnums=(2,), compiler_options=dict(options))

    def launcher(self, function: Any, sizes: Sizes, arguments: Sequence[Any]) -> None:
        """None: arguments that are divided over devices go through JAX's dispatch."""

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = REPLICATED) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(partition)) if shape else jax.ShapeDtypeStruct(shape, dtype)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = REPLICATED) -> Any:
        """A new array of zeros."""
        return self.array(np.broadcast_to(np.zeros((), dtype), shape), partition)

    def array(self, x: np.ndarray, partition: PartitionSpec = REPLICATED) -> Any:
        """A new array, of which only this process's pieces are copied."""
        return jax.make_array_from_callback(x.shape, self._sharding(partition), lambda index: np.array(x[index]))

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return jax.numpy.copy(x)

    def rearranged(self, x: Any, move: Move | None, partition: PartitionSpec = REPLICATED) -> Any:
        """`move(x)`, with this sharding; `x` itself if there is no move and it is sharded so already."""
        sharding = self._sharding(partition)
        if isinstance(x, jax.Array) and x.sharding.device_set == sharding.device_set and isinstance(x.sharding, NamedSharding):
            if move is None and x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            if x.sharding.mesh == self.over:
                return self._mover(move or _identity, sharding)(x)
        found = values(x)
        return self.array(found if move is None else move(found), partition)

    def values(self, x: Any) -> np.ndarray:
        """An array as NumPy's, whole."""
        return values(x)

    def max_over_devices(self, seconds: float) -> float:
        """The greatest of the processes' numbers, so that all of them choose alike."""
        return float(everyones(np.array(seconds, np.float32)).max())

    def waited(self, arrays: Any) -> Any:
        """The arrays, waited for: only a wait notices that another process is lost.

        Raises:
          PeerError: a process of the computation does not answer any more.
        """
        with peers():
            return jax.block_until_ready(arrays)

    def _sharding(self, partition: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.over, partition)

    def _mover(self, move: Move, sharding: NamedSharding) -> Callable[[Any], Any]:
        if (move, sharding) not in self._moving:
            self._moving[move, sharding] = jax.jit(move, out_shardings=sharding)
        return self._moving[move, sharding]


def host_of(program: Program) -> Host:
    """JAX's default backend, and under `jax.distributed` all processes for a Program of several chips.

    Raises:
      ConfigError: its chips do not divide over the processes, or the processes have different Programs.
    """
    if chips_of(program.mesh) == 1 or count() == 1:
        return DEFAULT
    host = SpreadHost(program.mesh, devices())
    advice = "Give all of them the same code, data and options, in the same order."
    check_alike(f"the program {program.name!r}", bytes.fromhex(code_hash(program)), advice)
    return host


def parts_of(mesh: Sequence[MeshAxis], devices: int) -> tuple[int, ...]:
    """In how many parts each axis of a mesh is cut, the first ones in as many as there can be, for so many devices to have one each.

    Raises:
      ConfigError: the mesh's chips do not divide over the devices.
    """
    parts, left = [], devices
    for axis in mesh:
        parts.append(math.gcd(axis.size, left))
        left //= parts[-1]
    if left != 1:
        axes = ", ".join(f"{axis.name!r}: {axis.size}" for axis in mesh)
        raise ConfigError(
            f"mesh: its {chips_of(mesh)} chips ({axes}) do not divide over the {devices} processes of this computation, each of which "
            f"holds as many as the others; give a mesh of a multiple of {devices} chips, or start another number of processes."
        )
    return tuple(parts)


def _identity(x: Any) -> Any:
    return x
