"""Kernels that run together: the straight-line code of several small ones, of any shapes, in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.onchip import DoesNotFit
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.site import Kernels, Site
from tpuflow.lower.graph.graph import Node

Emit = Callable[[Site], Kernels]


@dataclass(frozen=True, slots=True)
class _Member:
    """One node among several: as it would be emitted by itself, and what it has recorded for that."""

    site: Site
    recorded: tuple[KernelBuilder, ...]

    @property
    def straight(self) -> bool:
        """Whether all its kernels are of one step."""
        return not any(builder.grid for builder in self.recorded)


def emit_several(site: Site, emit: Emit) -> Kernels:
    """One kernel of all members whose arrays are one tile each; more where the chip's memory asks for it. `emit` emits one by itself."""
    members = [_member(site, node, emit) for node in site.region.nodes]
    apart = tuple(k for m in members if not m.straight for k in emit(m.site))
    return _together(site, [m for m in members if m.straight], emit) + apart


def _member(site: Site, node: Node, emit: Emit) -> _Member:
    buffers = {**site.region.inputs, **dict(site.region.outputs)}
    own = replace(site, node=node, region=Region.of(node, [buffers[v] for v in (*node.inputs, *node.results)]))
    recorded: list[KernelBuilder] = []
    emit(replace(own, recorded=recorded))
    return _Member(own, tuple(recorded))


def _together(site: Site, members: Sequence[_Member], emit: Emit) -> Kernels:
    """As few kernels as the chip's memory allows."""
    if not members:
        return ()
    kernel = site.kernel()
    kernel.take(builder for m in members for builder in m.recorded)
    try:
        return (kernel.build(),)
    except DoesNotFit:
        half = len(members) // 2
        if not half:
            return emit(members[0].site)
        return _together(site, members[:half], emit) + _together(site, members[half:], emit)
