"""Reduce kernels: parallel grid axes over kept axes, sequential ones over reduced axes, an accumulator tile carried between steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tpuflow.isa.vector import Constant, ReduceInto
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.map import emit_map_with
from tpuflow.lower.emit.nest import Nest, Unit, merge
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots, operands
from tpuflow.lower.emit.site import Plans, Site
from tpuflow.lower.graph.blocking import block_shape, is_ordered, sum_block
from tpuflow.lower.graph.builder import identity
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.tiling import Space


def block_elems(reduction: Node) -> int:
    """Elements of a block of a reduction (`blocking.sum_block`)."""
    return sum_block(reduction.inputs[0].shape, reduction.attrs["axes"])


def sum_units(reductions: Sequence[Node], sizes: Sequence[int]) -> tuple[int, ...]:
    """What tiles must be multiples of along reduced (merged) axes of these sizes: the shape of a block, or 1 where order is free."""
    ordered = any(is_ordered(r.attrs["op"], r.result.dtype) for r in reductions)
    return block_shape(sizes, block_elems(reductions[0])) if ordered else (1,) * len(sizes)


def live_reductions(region: Region) -> tuple[Node, ...]:
    """The reductions that the region's results use."""
    want = region.needed(region.results)
    return tuple(n for n in region.find("reduce") if n.result in want)


def _results(region: Region) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The results over the iteration space, and those over the axes that are not reduced."""
    reduced = live_reductions(region)[0].result.shape
    return tuple(v for v in region.results if v.shape != reduced), tuple(v for v in region.results if v.shape == reduced)


def reduce_levels(region: Region) -> list[Roots]:
    """Two levels: the operands of reductions, and other results, over the iteration space, and results over the axes that are not
    reduced."""
    reductions = live_reductions(region)
    whole = tuple(range(len(reductions[0].inputs[0].shape)))
    kept = tuple(a for a in whole if a not in reductions[0].attrs["axes"])
    of_whole, of_reduced = _results(region)
    return [((*(r.inputs[0] for r in reductions), *of_whole), whole), (of_reduced, kept)]


def emit_reduce(site: Site) -> Plans:
    """One kernel: map over the iteration space, reduce into accumulators, map over the reduced space."""
    region = site.region
    reductions = live_reductions(region)
    shape, (of_whole, of_reduced) = reductions[0].inputs[0].shape, _results(region)
    if math.prod(of_reduced[0].shape) == 0:
        return ()
    if math.prod(shape) == 0:
        site = replace(site, region=replace(region, outputs=region.stored(of_reduced)))
        return emit_map_with(site, {r: identity(r.attrs["op"], r.result.dtype) for r in reductions})
    levels = reduce_levels(region)
    merged = merge(dict(enumerate(shape)), operands(region, levels))
    axes = tuple(range(len(merged.sizes)))
    reduced = merged.fold(reductions[0].attrs["axes"])
    in_order = dict(zip(reduced, sum_units(reductions, [merged.sizes[a] for a in reduced]), strict=True))
    space = "vmem" if axes else "smem"
    whole = Level(levels[0][1], axes, space)
    rest = Level(levels[1][1], tuple(Unit(f"reduced {a}") if a in reduced else a for a in axes), space)

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        above = LevelEmitter(kernel, region, merged, nest, whole, {}, {})
        below = LevelEmitter(kernel, region, merged, nest, rest, {}, {})
        _emit_reductions(kernel, above, below, reductions, reduced)
        above.emit(of_whole)
        above.store(region.stored(of_whole))
        kernel.section = "epilogue"
        below.emit(of_reduced)
        below.store(region.stored(of_reduced))
        return kernel

    return site.fit(attempt, Space(merged.sizes, reduced, units=in_order), region.widest_bytes())


def init_accumulators(kernel: KernelBuilder, below: LevelEmitter, reductions: Sequence[Node]) -> None:
    """Emit the accumulators of reductions, filled with the identity of each."""
    for r in reductions:
        kernel.source = r.source
        below.tiles[r.result] = below.new(r.result.dtype)
        kernel.emit(Constant(below.tiles[r.result], identity(r.attrs["op"], r.result.dtype)))


def accumulate(kernel: KernelBuilder, above: LevelEmitter, below: LevelEmitter, reductions: Sequence[Node], axes: tuple[int, ...]) -> None:
    """Emit the reduction of this step's tiles along `axes` into the accumulators."""
    tiles = above.emit([r.inputs[0] for r in reductions])
    for r, tile in zip(reductions, tiles, strict=True):
        kernel.source = r.source
        kernel.emit(ReduceInto(r.attrs["op"], below.tiles[r.result], tile, axes, block_elems(r)))


def _emit_reductions(
    kernel: KernelBuilder, above: LevelEmitter, below: LevelEmitter, reductions: Sequence[Node], reduced: tuple[int, ...]
) -> None:
    """Emit prologue and body. Where all reduced axes have size 1, the operands are the results."""
    if reduced:
        kernel.section = "prologue"
        init_accumulators(kernel, below, reductions)
        kernel.section = "body"
        accumulate(kernel, above, below, reductions, tuple(sorted(reduced)))
        return
    kernel.section = "body"
    below.tiles.update(zip([r.result for r in reductions], above.emit([r.inputs[0] for r in reductions]), strict=True))
