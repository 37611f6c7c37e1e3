"""Horizontal fusion of small kernels: the straight-line code of several independent ones, of any shapes, in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.site import Plan, Plans, Site
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.graph.tiling import Tiling

UNCUT = Tiling(())


@dataclass(frozen=True, slots=True)
class _Member:
    """One fused node: its plans, and their kernels recorded with the largest tiles."""

    plans: Plans
    recorded: tuple[KernelBuilder, ...]

    @property
    def straight(self) -> bool:
        """Whether all its kernels have one step, so that they are straight-line code."""
        return not any(builder.grid for builder in self.recorded)


def emit_several(site: Site, emit: Callable[[Site], Plans]) -> Plans:
    """One kernel of all members whose arrays are one tile each; more kernels where it does not fit. `emit`: plans one member by itself."""
    members = [_member(site, node, emit) for node in site.region.nodes]
    apart = tuple(plan for m in members if not m.straight for plan in m.plans)
    return _together(site, [m for m in members if m.straight]) + apart


def _member(site: Site, node: Node, emit: Callable[[Site], Plans]) -> _Member:
    buffers = {**site.region.inputs, **dict(site.region.outputs)}
    plans = emit(replace(site, node=node, region=Region.of(node, [buffers[v] for v in (*node.inputs, *node.results)])))
    return _Member(plans, tuple(plan.record_largest() for plan in plans))


def _together(site: Site, members: Sequence[_Member]) -> Plans:
    """One kernel; where it does not fit on the chip, one for each half of the members."""
    if not members:
        return ()

    def record(tiling: Tiling) -> KernelBuilder:
        kernel = site.kernel()
        kernel.append_all(builder for m in members for builder in m.recorded)
        return kernel

    def halved() -> Plans:
        half = len(members) // 2
        return _together(site, members[:half]) + _together(site, members[half:]) if half else members[0].plans

    return (Plan(site.node, site.scope, record, lambda rule: (UNCUT,), halved, tiled=False),)
