"""The chips of a mesh in one XLA:CPU executable: each axis is a `vmap` with a name, every chip a lane of it.

Where several devices share the mesh (`tpuflow.device.fast.host_devices`) a device has the chips of one part of each axis, and the `vmap` is
inside of a `shard_map` over the devices: a collective over a mesh axis goes over the lanes of each device, then over the devices.

An array that is the same on all chips along an axis (`tpuflow.device.varying`) has no lanes there and is computed once. An array that one
executable hands to the next has the mesh axes along which it may differ as leading dimensions, in the mesh's order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tpuflow.device.fast.host import REPLICATED, Host, Move
from tpuflow.device.fast.lane_by_lane import of_lane
from tpuflow.device.fast.liveness import Key
from tpuflow.device.fast.slices import dynamic_index_in_dim
from tpuflow.device.shards import shard, unshard
from tpuflow.device.varying import Axes, cut_axes, varying
from tpuflow.isa.collectives import Cut, sizes_of
from tpuflow.isa.program import Port, Program, children, walk

Tree = Any


class Lanes:
    """The layout of a verified Program's arrays over its chips. Without a mesh every method leaves arrays as they are."""

    def __init__(self, program: Program, over: Mesh | None = None):
        self.program, self.mesh, self.over = program, program.mesh, over
        self.names = tuple(f"mesh axis {n}" for n in range(len(program.mesh)))
        self.devices: tuple[str, ...] = over.axis_names if over is not None else ()
        self.parts: tuple[int, ...] = over.devices.shape if over is not None else (1,) * len(self.mesh)

    @functools.cached_property
    def varying(self) -> Any:
        """The Program's `Varying`: which buffers and which control flow may differ from chip to chip."""
        return varying(self.program)

    @functools.cached_property
    def divergent(self) -> frozenset[int]:
        """The ids of loops and switches with divergent control: chips may run them differently."""
        return frozenset(number for number, axes in self.varying.decided.items() if axes) if self.mesh else frozenset()

    @functools.cached_property
    def within_divergent(self) -> frozenset[int]:
        """The ids of the blocks nested in a divergent block, which some devices may not reach."""
        blocks = (b for _, b in walk(self.program.code) if id(b) in self.divergent)
        return frozenset(id(inner) for b in blocks for _, code in children(b) for _, inner in walk(code))

    def axes(self, key: Key) -> Axes:
        """The mesh axes that are leading dimensions of an array handed from executable to executable."""
        if not self.mesh:
            return frozenset()
        if isinstance(key, int):
            return self.varying.buffers[key]
        return cut_axes(self.program.outfeeds[key[1]]) if key[0] == "outfeed" else frozenset()

    def shape(self, key: Key, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of such an array, whose shape on one chip is `shape`."""
        return (*sizes_of(self.mesh, sorted(self.axes(key))), *shape)

    def partition(self, axes: Axes) -> PartitionSpec:
        """The sharding over the devices of an array with these leading mesh axes."""
        return PartitionSpec(*(self.devices[a] for a in sorted(axes))) if self.devices else REPLICATED

    def count(self, axes: Sequence[int]) -> int:
        """How many of the chips along some axes are on one device."""
        return math.prod(self.mesh[a].size // self.parts[a] for a in axes)

    def mapped(self, function: Callable[..., Any], ins: Tree, outs: Tree) -> Callable[..., Any]:
        """A function of one chip's arrays, over all chips; ins, outs: the leading mesh axes of every argument and result, as trees."""
        for n in reversed(range(len(self.mesh))):
            front, lanes = functools.partial(_mapped, n), self.count((n,))
            function = jax.vmap(function, _leaves(front, ins), _leaves(front, outs), axis_name=self.names[n], axis_size=lanes)
        if self.over is None:
            return function
        in_specs, out_specs = _leaves(self.partition, ins), _leaves(self.partition, outs)
        return jax.shard_map(function, mesh=self.over, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # ---- within

    def position(self, axis: int) -> Any:
        """s32: the chip's index along a mesh axis, over all devices."""
        lane = lax.axis_index(self.names[axis])
        if self.parts[axis] == 1:
            return lane
        return lax.axis_index(self.devices[axis]) * self.count((axis,)) + lane

    def gathered(self, xs: Sequence[Any], axes: Sequence[int]) -> list[Any]:
        """All-gathers over a group of chips, which between devices are one: each [elems] -> [chips, elems]."""
        found = list(xs)
        for a in reversed(axes):
            found = self._along(found, a)
        return [x.reshape(-1, sent.shape[-1]) for x, sent in zip(found, xs, strict=True)]

    def side_by_side(self, x: Any, axes: Sequence[int]) -> Any:
        """An all-gather over those chips of a group that are on this device: [...] -> [chips, ...]."""
        shape = x.shape
        for a in reversed(axes):
            x = lax.all_gather(x, self.names[a])
        return x.reshape(-1, *shape)

    def over_devices(self, xs: Sequence[Any], axes: Sequence[int], combine: Callable[[Any, Any], Any]) -> list[Any]:
        """Values that each device has reduced over its own chips of a group, reduced over the devices by `combine`, all at once."""
        found = list(xs)
        for a in axes:
            if self.parts[a] > 1:
                found = [functools.reduce(combine, rows) for rows in self._between(found, a)]
        return found

    def _along(self, xs: Sequence[Any], axis: int) -> list[Any]:
        """All-gathers along one mesh axis: each [...] -> [chips along the axis, ...]."""
        xs = [lax.all_gather(x, self.names[axis]) for x in xs]
        if self.parts[axis] == 1:
            return xs
        return [x.reshape(self.mesh[axis].size, *x.shape[2:]) for x in self._between(xs, axis)]

    def _between(self, xs: Sequence[Any], axis: int) -> list[Any]:
        """All-gathers over the devices along an axis: each [...] -> [devices, ...]. Those of a type are one, since devices of different
        processes wait milliseconds for each other."""
        found: dict[int, Any] = {}
        for dtype in dict.fromkeys(x.dtype for x in xs):
            these = [n for n, x in enumerate(xs) if x.dtype == dtype]
            rows = lax.all_gather(jnp.concatenate([xs[n].reshape(-1) for n in these]), self.devices[axis])
            pieces = lax.split(rows, [xs[n].size for n in these], 1)
            found |= {n: piece.reshape(rows.shape[0], *xs[n].shape) for n, piece in zip(these, pieces, strict=True)}
        return [found[n] for n in range(len(xs))]

    def own(self, rows: Any, axes: Sequence[int]) -> Any:
        """The row of this chip, of rows for each chip of a group: [chips, elems] -> [elems]."""
        x = rows.reshape(*sizes_of(self.mesh, axes), -1)
        for a in axes:
            if self.parts[a] > 1:
                x = x.reshape(self.parts[a], -1, *x.shape[1:])
                x = dynamic_index_in_dim(x, lax.axis_index(self.devices[a]), 0, keepdims=False)
            x = of_lane(x, lax.axis_index(self.names[a]))
        return x

    def own_here(self, rows: Any, axes: Sequence[int]) -> Any:
        """The row of this chip, of rows for those chips of a group that are on this device: [chips, ...] -> [...]."""
        x = rows.reshape(*(self.count((a,)) for a in axes), *rows.shape[1:])
        for a in axes:
            x = of_lane(x, lax.axis_index(self.names[a]))
        return x

    def on_first_device(self, function: Callable[..., list[Any]], otherwise: list[Any], *operands: Any) -> list[Any]:
        """The results of a function on the first device, which all others get too; they have `otherwise`, of the same types, meanwhile."""
        if self.over is None:
            return function(*operands)
        here = functools.reduce(lax.bitwise_and, [lax.axis_index(name) == 0 for name in self.devices])
        found = lax.cond(here, lambda operands: function(*operands), lambda _: otherwise, operands)
        return [self.first(x, frozenset(range(len(self.mesh)))) for x in found]

    def greatest(self, x: Any, axes: Axes, *, here: bool) -> Any:
        """The maximum of a scalar over some axes; `here`: over this device's chips only, since other devices may not reach it."""
        for a in sorted(axes):
            x = jnp.max(lax.all_gather(x, self.names[a]) if here else self._along([x], a)[0])
        return x

    def first(self, x: Any, axes: Axes) -> Any:
        """The value of the first chip along some axes."""
        for a in sorted(axes):
            x = self._along([x], a)[0][0]
        return x

    # ---- between host and chips

    def inputs(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """The host's arrays, one for each input port, sharded over the chips."""
        if not self.mesh:
            return list(arrays)
        return [host.rearranged(x, move, partition) for x, (move, partition) in zip(arrays, self._input_moves, strict=True)]

    def infeeds(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """Stacked items [items, ...] of every port: [mesh axes..., items, ...]."""
        if not self.mesh:
            return list(arrays)
        moves = [functools.partial(shard, cut=p.cut, mesh=self.mesh, axes=cut_axes(p), lead=1) for p in self.program.infeeds]
        rows = zip(arrays, moves, self.program.infeeds, strict=True)
        return [host.rearranged(x, move, self.partition(cut_axes(p))) for x, move, p in rows]

    def outputs(self, arrays: Sequence[Any], host: Host) -> list[Any]:
        """The arrays of the output ports, unsharded."""
        if not self.mesh:
            return list(arrays)
        return [host.rearranged(x, move, partition) for x, (move, partition) in zip(arrays, self._output_moves, strict=True)]

    def sent(self, port: int, items: Any) -> Any:
        """An outfeed's items: [mesh axes..., items, ...] -> [items, ...]."""
        return unshard(items, self.program.outfeeds[port].cut, self.mesh, self.axes(("outfeed", port)), 1) if self.mesh else items

    @functools.cached_property
    def _input_moves(self) -> list[tuple[Move | None, PartitionSpec]]:
        """For every input, how it is sharded into leading axes (None: not at all), and the sharding of the result over devices."""
        return [(self._move(shard, p), self.partition(self.axes(p.buffer))) for p in self.program.inputs]

    @functools.cached_property
    def _output_moves(self) -> list[tuple[Move | None, PartitionSpec]]:
        """For every output, how it is unsharded (None: not at all), and the sharding of the whole array over devices."""
        return [(self._move(unshard, p), self._whole_partition(p.cut)) for p in self.program.outputs]

    def _move(self, function: Callable[..., Any], port: Port) -> Move | None:
        axes = self.axes(port.buffer)
        return functools.partial(function, cut=port.cut, mesh=self.mesh, axes=axes) if axes or cut_axes(port) else None

    def _whole_partition(self, cut: Cut) -> PartitionSpec:
        """The sharding of a whole array that `cut` divides over chips: over devices, as far as the shards of a device are contiguous."""
        return PartitionSpec(*(self._contiguous(axes) for axes in cut)) if self.devices else REPLICATED

    def _contiguous(self, axes: Sequence[int]) -> tuple[str, ...]:
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
