"""A function of arrays run once on the device, with every operation's numbers measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.jaxprs.compat import ClosedJaxpr, prune
from tpuflow.numerics.collecting import operation_row, tensor_row
from tpuflow.numerics.interpreter import ABSENT, MeasuringInterpreter
from tpuflow.numerics.report import NumericsReport, in_order
from tpuflow.numerics.scopes import BACKWARD
from tpuflow.stages.staging import Target, as_array


def measure_function(closed: ClosedJaxpr, arguments: Sequence[Any], name: str, policy: str, target: Target) -> NumericsReport:
    """Run a traced function on arrays of its inputs' shapes and types; `policy` names the precision that it was traced in.

    The report has rows and operations; losses, updates and loss scales are a training's.

    Raises:
      UnsupportedPrimitiveError, OutOfMemoryError: as compiling the function itself does.
    """
    closed = prune(closed)
    gradients = [False] * len(closed.out_avals)
    listing = MeasuringInterpreter(name, target, runs=False)
    listing.run(closed, [ABSENT] * len(closed.in_avals), gradients)
    interpreter = MeasuringInterpreter(name, target, trains=any(site.phase == BACKWARD for site in listing.measurements.sites))
    interpreter.run(closed, [interpreter.track(as_array(a)) for a in arguments], gradients)
    pairs = zip(interpreter.measurements.sites, interpreter.measurements.figures(), strict=True)
    operations = tuple(operation_row(site, [counts]) for site, counts in pairs)
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
