"""The chips of a mesh in one XLA:CPU executable: each axis is a `vmap` with a name, every chip a lane of it.

What is the same on all chips along an axis (`tpuflow.device.varying`) is one array there, computed once. Any other array that crosses from
executable to executable has the axes along which it may differ in front, in the mesh's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.host import Host
from tpuflow.device.fast.liveness import Key
from tpuflow.device.shards import apart, together
from tpuflow.device.varying import Axes, cut_axes, varying
from tpuflow.isa.collectives import sizes_of
from tpuflow.isa.program import Program

Tree = Any


class Lanes:
    """How the arrays of a verified Program lie over its chips; on one chip there is nothing to it."""

    def __init__(self, program: Program):
        self.program, self.mesh = program, program.mesh
        self.names = tuple(f"mesh axis {n}" for n in range(len(program.mesh)))

    @functools.cached_property
    def varying(self) -> Any:
        """What may differ from chip to chip."""
        return varying(self.program)

    @functools.cached_property
    def uneven(self) -> frozenset[int]:
        """The ids of blocks that chips may not all run alike."""
        return frozenset(number for number, axes in self.varying.decided.items() if axes) if self.mesh else frozenset()

    def axes(self, key: Key) -> Axes:
        """The mesh axes in front of an array that crosses."""
        if not self.mesh:
            return frozenset()
        if isinstance(key, int):
            return self.varying.buffers[key]
        return cut_axes(self.program.outfeeds[key[1]]) if key[0] == "outfeed" else frozenset()

    def shape(self, key: Key, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape with these axes in front."""
        return (*sizes_of(self.mesh, sorted(self.axes(key))), *shape)

    def over(self, function: Callable[..., Any], ins: Tree, outs: Tree) -> Callable[..., Any]:
        """A function of one chip's arrays as one of all chips'. ins, outs: for every argument and result its axes."""
        for n in reversed(range(len(self.mesh))):
            mapped = functools.partial(_mapped, n)
            function = jax.vmap(function, _leaves(mapped, ins), _leaves(mapped, outs), axis_name=self.names[n], axis_size=self.mesh[n].size)
        return function

    # ---- within

    def position(self, axis: int) -> Any:
        """s32: the lane."""
        return lax.axis_index(self.names[axis])

    def gathered(self, x: Any, axes: Sequence[int]) -> Any:
        """What the chips of a group have: [elems] -> [chips, elems]."""
        elems = x.shape[-1]
        for a in reversed(axes):
            x = lax.all_gather(x, self.names[a])
        return x.reshape(-1, elems)

    def own(self, rows: Any, axes: Sequence[int]) -> Any:
        """A chip's own of a group's rows."""
        number: Any = 0
        for a in axes:
            number = number * self.mesh[a].size + self.position(a)
        return lax.dynamic_index_in_dim(rows, number, 0, keepdims=False)

    def greatest(self, x: Any, axes: Axes) -> Any:
        """One scalar for chips that may differ along some axes."""
        for a in sorted(axes):
            x = jnp.max(lax.all_gather(x, self.names[a]))
        return x

    def first(self, x: Any, axes: Axes) -> Any:
        """What the first of the chips along some axes has."""
        for a in sorted(axes):
            x = lax.all_gather(x, self.names[a])[0]
        return x

    def alike(self, x: Any) -> Any:
        """What the first of all chips has."""
        return self.first(x, frozenset(range(len(self.mesh))))

    # ---- between host and chips

    def inputs(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """The host's arrays, one a port, over the chips."""
        if not self.mesh:
            return list(arrays)
        cut = [functools.partial(apart, cut=p.cut, mesh=self.mesh, axes=self.axes(p.buffer)) for p in self.program.inputs]
        return [host.rearranged(_plain(x), way) for x, way in zip(arrays, cut, strict=True)]

    def infeeds(self, arrays: Sequence[Any]) -> list[Any]:
        """Stacked items [items, ...] of every port: [mesh axes..., items, ...]."""
        ports = self.program.infeeds
        return (
            [apart(_plain(x), p.cut, self.mesh, cut_axes(p), 1) for p, x in zip(ports, arrays, strict=True)] if self.mesh else list(arrays)
        )

    def outputs(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """The host's arrays again."""
        if not self.mesh:
            return list(arrays)
        join = [functools.partial(together, cut=p.cut, mesh=self.mesh, axes=self.axes(p.buffer)) for p in self.program.outputs]
        return [host.rearranged(x, way) for x, way in zip(arrays, join, strict=True)]

    def sent(self, port: int, items: Any) -> Any:
        """An outfeed's items: [mesh axes..., items, ...] -> [items, ...]."""
        return together(items, self.program.outfeeds[port].cut, self.mesh, self.axes(("outfeed", port)), 1) if self.mesh else items


def _plain(array: Any) -> Any:
    """An array that lies on several devices of the host, as NumPy sees it."""
    several = isinstance(array, jax.Array) and len(array.devices()) > 1
    return np.asarray(array) if several else array


def _mapped(number: int, axes: Axes) -> int | None:
    return 0 if number in axes else None


def _leaves(function: Callable[[Axes], Any], tree: Tree) -> Tree:
    """A tree of lists and tuples of axes, each changed."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(_leaves(function, item) for item in tree)
    return function(tree)
