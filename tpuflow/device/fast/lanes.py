"""The chips of a mesh in one XLA:CPU executable: each axis is a `vmap` with a name, every chip a lane of it.

Where several devices share the mesh (`tpuflow.device.fast.host_devices`) a device has the chips of one part of each axis, and the `vmap` is
inside of a `shard_map` over the devices: what goes over an axis goes over a device's lanes, then over the devices.

What is the same on all chips along an axis (`tpuflow.device.varying`) is one array there, computed once. Any other array that crosses from
executable to executable has the axes along which it may differ in front, in the mesh's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tpuflow.device.fast.host import WHOLE, Host, Way
from tpuflow.device.fast.lane_by_lane import of_lane
from tpuflow.device.fast.liveness import Key
from tpuflow.device.shards import apart, together
from tpuflow.device.varying import Axes, cut_axes, varying
from tpuflow.isa.collectives import Cut, sizes_of
from tpuflow.isa.program import Port, Program, children, walk

Tree = Any


class Lanes:
    """How the arrays of a verified Program lie over its chips; on one chip there is nothing to it."""

    def __init__(self, program: Program, over: Mesh | None = None):
        self.program, self.mesh, self.over = program, program.mesh, over
        self.names = tuple(f"mesh axis {n}" for n in range(len(program.mesh)))
        self.devices: tuple[str, ...] = over.axis_names if over is not None else ()
        self.parts: tuple[int, ...] = over.devices.shape if over is not None else (1,) * len(self.mesh)

    @functools.cached_property
    def varying(self) -> Any:
        """What may differ from chip to chip."""
        return varying(self.program)

    @functools.cached_property
    def uneven(self) -> frozenset[int]:
        """The ids of blocks that chips may not all run alike."""
        return frozenset(number for number, axes in self.varying.decided.items() if axes) if self.mesh else frozenset()

    @functools.cached_property
    def within_uneven(self) -> frozenset[int]:
        """The ids of blocks in such a block, to which not every device may come."""
        blocks = (b for _, b in walk(self.program.code) if id(b) in self.uneven)
        return frozenset(id(inner) for b in blocks for _, code in children(b) for _, inner in walk(code))

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

    def lies(self, axes: Axes) -> PartitionSpec:
        """How an array with these axes in front lies over the devices."""
        return PartitionSpec(*(self.devices[a] for a in sorted(axes))) if self.devices else WHOLE

    def mapped(self, function: Callable[..., Any], ins: Tree, outs: Tree) -> Callable[..., Any]:
        """A function of one chip's arrays as one of all chips'. ins, outs: for every argument and result its axes."""
        for n in reversed(range(len(self.mesh))):
            front, lanes = functools.partial(_mapped, n), self.mesh[n].size // self.parts[n]
            function = jax.vmap(function, _leaves(front, ins), _leaves(front, outs), axis_name=self.names[n], axis_size=lanes)
        if self.over is None:
            return function
        lie_in, lie_out = _leaves(self.lies, ins), _leaves(self.lies, outs)
        return jax.shard_map(function, mesh=self.over, in_specs=lie_in, out_specs=lie_out, check_vma=False)

    # ---- within

    def position(self, axis: int) -> Any:
        """s32: the lane, after those of the devices before."""
        lane = lax.axis_index(self.names[axis])
        if self.parts[axis] == 1:
            return lane
        return lax.axis_index(self.devices[axis]) * (self.mesh[axis].size // self.parts[axis]) + lane

    def gathered(self, x: Any, axes: Sequence[int]) -> Any:
        """What the chips of a group have: [elems] -> [chips, elems]."""
        elems = x.shape[-1]
        for a in reversed(axes):
            x = self._along(x, a)
        return x.reshape(-1, elems)

    def side_by_side(self, x: Any, axes: Sequence[int]) -> Any:
        """What one device's chips of a group have: [...] -> [chips, ...]"""
        shape = x.shape
        for a in reversed(axes):
            x = lax.all_gather(x, self.names[a])
        return x.reshape(-1, *shape)

    def over_devices(self, x: Any, axes: Sequence[int], combine: Callable[[Any, Any], Any]) -> Any:
        """What one device's chips of a group have together, of all devices one after the other."""
        for a in axes:
            if self.parts[a] > 1:
                x = functools.reduce(combine, lax.all_gather(x, self.devices[a]))
        return x

    def _along(self, x: Any, axis: int) -> Any:
        """[...] -> [chips along the axis, ...]"""
        x = lax.all_gather(x, self.names[axis])
        if self.parts[axis] == 1:
            return x
        return lax.all_gather(x, self.devices[axis]).reshape(self.mesh[axis].size, *x.shape[1:])

    def own(self, rows: Any, axes: Sequence[int]) -> Any:
        """A chip's own of a group's rows: [chips, elems] -> [elems]."""
        x = rows.reshape(*sizes_of(self.mesh, axes), -1)
        for a in axes:
            if self.parts[a] > 1:
                x = x.reshape(self.parts[a], -1, *x.shape[1:])
                x = lax.dynamic_index_in_dim(x, lax.axis_index(self.devices[a]), 0, keepdims=False)
            x = of_lane(x, lax.axis_index(self.names[a]))
        return x

    def greatest(self, x: Any, axes: Axes, *, here: bool) -> Any:
        """One scalar for chips that may differ along some axes; `here`: for the chips of one device, where others may not come to ask."""
        for a in sorted(axes):
            x = jnp.max(lax.all_gather(x, self.names[a]) if here else self._along(x, a))
        return x

    def first(self, x: Any, axes: Axes) -> Any:
        """What the first of the chips along some axes has."""
        for a in sorted(axes):
            x = self._along(x, a)[0]
        return x

    def alike(self, x: Any) -> Any:
        """What the first of a device's chips has."""
        for name in self.names:
            x = lax.all_gather(x, name)[0]
        return x

    # ---- between host and chips

    def inputs(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """The host's arrays, one a port, over the chips."""
        if not self.mesh:
            return list(arrays)
        return [host.rearranged(x, way, lies) for x, (way, lies) in zip(arrays, self._cutting, strict=True)]

    def infeeds(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """Stacked items [items, ...] of every port: [mesh axes..., items, ...]."""
        if not self.mesh:
            return list(arrays)
        ways = [functools.partial(apart, cut=p.cut, mesh=self.mesh, axes=cut_axes(p), lead=1) for p in self.program.infeeds]
        rows = zip(arrays, ways, self.program.infeeds, strict=True)
        return [host.rearranged(x, way, self.lies(cut_axes(p))) for x, way, p in rows]

    def outputs(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """The host's arrays again."""
        if not self.mesh:
            return list(arrays)
        return [host.rearranged(x, way, lies) for x, (way, lies) in zip(arrays, self._joining, strict=True)]

    def sent(self, port: int, items: Any) -> Any:
        """An outfeed's items: [mesh axes..., items, ...] -> [items, ...]."""
        return together(items, self.program.outfeeds[port].cut, self.mesh, self.axes(("outfeed", port)), 1) if self.mesh else items

    @functools.cached_property
    def _cutting(self) -> list[tuple[Way | None, PartitionSpec]]:
        """For every input how it is cut, and how its pieces lie."""
        return [(self._way(apart, p), self.lies(self.axes(p.buffer))) for p in self.program.inputs]

    @functools.cached_property
    def _joining(self) -> list[tuple[Way | None, PartitionSpec]]:
        """For every output how it is joined, and how the whole array lies."""
        return [(self._way(together, p), self._whole_lies(p.cut)) for p in self.program.outputs]

    def _way(self, function: Callable[..., Any], port: Port) -> Way | None:
        axes = self.axes(port.buffer)
        return functools.partial(function, cut=port.cut, mesh=self.mesh, axes=axes) if axes or cut_axes(port) else None

    def _whole_lies(self, cut: Cut) -> PartitionSpec:
        """How a whole array lies that is cut so: as its pieces do, as far as a device's are next to one another."""
        return PartitionSpec(*(self._next_to_another(axes) for axes in cut)) if self.devices else WHOLE

    def _next_to_another(self, axes: Sequence[int]) -> tuple[str, ...]:
        found: list[str] = []
        for a in axes:
            found.append(self.devices[a])
            if self.parts[a] < self.mesh[a].size:
                break
        return tuple(found)


def _mapped(number: int, axes: Axes) -> int | None:
    return 0 if number in axes else None


def _leaves(function: Callable[[Axes], Any], tree: Tree) -> Tree:
    """A tree of lists and tuples of axes, each changed."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(_leaves(function, item) for item in tree)
    return function(tree)
