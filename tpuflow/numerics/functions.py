"""A function of arrays run once on the device, with every operation's numbers measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpuflow.jaxprs.compat import ClosedJaxpr, prune
from tpuflow.numerics.collecting import operation_row, tensor_row
from tpuflow.numerics.instrumenting import counted
from tpuflow.numerics.report import NumericsReport, in_order
from tpuflow.numerics.scopes import BACKWARD
from tpuflow.numerics.walking import Walk, track
from tpuflow.stages.staging import DeviceFunction, Target, as_array


def measure_function(closed: ClosedJaxpr, arguments: Sequence[Any], name: str, policy: str, target: Target) -> NumericsReport:
    """Run a traced function on arrays of its inputs' shapes and types; `policy` names the precision that it was traced in.

    The report has rows and operations; losses, updates and loss scales are a training's.

    Raises:
      UnsupportedPrimitiveError, OutOfMemoryError: as compiling the function itself does.
    """
    closed = prune(closed)
    walks: list[Walk] = []

    def measured(*values: Any, trains: bool) -> list[Any]:
        walk = Walk(name, trains=trains)
        walks[:] = [walk]
        walk.run(closed, [track(v) for v in values], [False] * len(closed.out_avals))
        return walk.found

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    jaxpr = jax.make_jaxpr(lambda *values: measured(*values, trains=True))(*specs)
    if not any(site.phase == BACKWARD for site in walks[0].sites):
        jaxpr = jax.make_jaxpr(lambda *values: measured(*values, trains=False))(*specs)
    structure = jax.tree.structure(walks[0].found)
    flat = DeviceFunction(jaxpr, "numerics", target)([as_array(a) for a in arguments])
    found = jax.tree.unflatten(structure, [np.asarray(x) for x in flat])
    pairs = zip(walks[0].sites, found, strict=True)
    operations = tuple(operation_row(s, [counted(f, s.dtype, len(s.shape), s.thresholds)]) for s, f in pairs)
    settings = {"model": name, "policy": policy, "chip": target.chip.name, "engine": target.engine, "fidelity": target.fidelity}
    return NumericsReport(
        settings=settings,
        losses=(),
        loss_scales=(),
        skipped=(),
        rows=in_order([tensor_row(row) for row in operations]),
        operations=operations,
        updates=(),
        scales=(),
    )
