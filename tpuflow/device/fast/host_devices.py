"""A mesh's chips over several devices of JAX, one of each process of a computation under `jax.distributed`.

Each axis of the mesh is cut in equal parts, one after the other: a device has the chips of one part of every axis, as lanes
(`tpuflow.device.fast.lanes`). Collectives go on between devices by JAX's own, over gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tpuflow.device.fast.host import DEFAULT, WHOLE, Host, Lies, Sizes, Way
from tpuflow.errors import ConfigError
from tpuflow.isa.collectives import MeshAxis, chips_of
from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Program
from tpuflow.jaxprs.processes import check_alike, count, devices, everyones, peers, values


class SpreadHost:
    """Devices that share a mesh. Arrays that cross are whole ones, of which each device holds its chips' part."""

    def __init__(self, mesh: Sequence[MeshAxis], devices: Sequence[Any]):
        """Of a mesh and its devices, in their order.

        Raises:
          ConfigError: the mesh's chips do not divide over the devices.
        """
        self.key = tuple(d.id for d in devices)
        parts = parts_of(mesh, len(devices))
        names = [f"devices of mesh axis {n}" for n in range(len(mesh))]
        self.over = Mesh(np.array(devices).reshape(parts), names)
        self._moving: dict[tuple[Way, NamedSharding], Callable[[Any], Any]] = {}

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated."""
        return jax.jit(function, donate_argnums=(2,), compiler_options=dict(options))

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = WHOLE) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(lies)) if shape else jax.ShapeDtypeStruct(shape, dtype)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = WHOLE) -> Any:
        """A new array of zeros."""
        return self.array(np.broadcast_to(np.zeros((), dtype), shape), lies)

    def array(self, x: np.ndarray, lies: Lies = WHOLE) -> Any:
        """A new array, of which only this process's pieces are copied."""
        return jax.make_array_from_callback(x.shape, self._sharding(lies), lambda index: np.array(x[index]))

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return jax.numpy.copy(x)

    def rearranged(self, x: Any, way: Way | None, lies: Lies = WHOLE) -> Any:
        """What is made of an array by a function that only moves elements; the array itself, where it lies so already, if there is none."""
        sharding = self._sharding(lies)
        if isinstance(x, jax.Array) and x.sharding.device_set == sharding.device_set and isinstance(x.sharding, NamedSharding):
            if way is None and x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            if x.sharding.mesh == self.over:
                return self._mover(way or _unmoved, sharding)(x)
        found = values(x)
        return self.array(found if way is None else way(found), lies)

    def values(self, x: Any) -> np.ndarray:
        """An array as NumPy's, whole."""
        return values(x)

    def agreed(self, seconds: float) -> float:
        """One figure for all devices, which must do alike: the greatest."""
        return float(everyones(np.array(seconds, np.float32)).max())

    def waited(self, arrays: Any) -> Any:
        """The arrays once they are there: a process that is lost shows where it is waited for.

        Raises:
          PeerError: a process of the computation does not answer any more.
        """
        with peers():
            return jax.block_until_ready(arrays)

    def _sharding(self, lies: Lies) -> NamedSharding:
        return NamedSharding(self.over, lies)

    def _mover(self, way: Way, sharding: NamedSharding) -> Callable[[Any], Any]:
        if (way, sharding) not in self._moving:
            self._moving[way, sharding] = jax.jit(way, out_shardings=sharding)
        return self._moving[way, sharding]


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


def _unmoved(x: Any) -> Any:
    return x
