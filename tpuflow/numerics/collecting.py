"""The rows of a numerics report, made from the measurements of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpuflow.numerics.instrumenting import InstrumentedStep, StepMeasurements
from tpuflow.numerics.interpreter import Site
from tpuflow.numerics.measures import Counts
from tpuflow.numerics.report import NumericsReport, in_order
from tpuflow.numerics.rows import OperationRow, ScaleRow, TensorRow, UpdateRow, added, figures_of, grouped, total


def report_of(
    settings: Mapping[str, Any], step: InstrumentedStep, done: Sequence[StepMeasurements], scales: Sequence[ScaleRow] = ()
) -> NumericsReport:
    """The report of steps that were run and measured."""
    operations = [operation_row(site, [m.counts[i] for m in done]) for i, site in enumerate(step.sites)]
    return NumericsReport(
        settings=settings,
        losses=tuple(float(m.figures.loss) for m in done),
        loss_scales=tuple(float(m.figures.loss_scale) for m in done),
        skipped=tuple(bool(m.figures.skipped) for m in done),
        rows=in_order([*map(tensor_row, operations), *_leaf_rows(step, done)]),
        operations=tuple(operations),
        updates=tuple(grouped(_update_rows(step, done), "layer", "parameter")),
        scales=tuple(scales),
    )


def operation_row(site: Site, counts: Sequence[Counts]) -> OperationRow:
    """The row of one operation from its figures in each step."""
    rows = []
    for number, one in enumerate(counts):
        born = np.flatnonzero(np.asarray(one.born).reshape(-1))
        first: dict[str, Any] = {"step": number, "trip": int(born[0])} if born.size else {}
        figures = figures_of(one, site.dtype)
        named = {
            name: getattr(site, name) for name in ("place", "loop", "primitive", "phase", "layer", "tensor", "source", "dtype", "shape")
        }
        rows.append(OperationRow(**figures, **named, born=total(one.born), **first))
    return added(sorted(rows, key=lambda row: row.step is None))


def tensor_row(row: OperationRow) -> TensorRow:
    """What an operation adds to the row of its layer, kind and type."""
    names = ("layer", "tensor", "dtype", "elements", "inf", "nan", "zeros", "subnormal", "underflow", "largest", "smallest")
    return TensorRow(**{name: getattr(row, name) for name in names})


def _leaf_rows(step: InstrumentedStep, done: Sequence[StepMeasurements]) -> list[TensorRow]:
    """Parameters before each step; updates of the steps that had one."""
    rows = []
    for m in done:
        for leaf, counts in zip(step.leaves, m.leaf_counts, strict=True):
            rows.append(_leaf_row(leaf.layer, "parameter", leaf.dtype, counts.parameter))
            if m.updated:
                rows.append(_leaf_row(leaf.layer, "update", leaf.update_dtype, counts.update))
    return rows


def _leaf_row(layer: str, tensor: str, dtype: str, counts: Counts) -> TensorRow:
    return TensorRow(layer=layer, tensor=tensor, dtype=dtype, **figures_of(counts, dtype))


def _update_rows(step: InstrumentedStep, done: Sequence[StepMeasurements]) -> list[UpdateRow]:
    rows = []
    for m in done:
        for leaf, counts in zip(step.leaves, m.leaf_counts, strict=True):
            found = {
                "elements": int(np.prod(leaf.shape, dtype=np.int64)),
                "with_gradient": int(counts.with_gradient),
                "lost": int(counts.lost),
                "vanished": int(counts.update.underflow),
            }
            counted = {name: value * m.updated for name, value in found.items()}
            rows.append(UpdateRow(layer=leaf.layer, parameter=leaf.name, dtype=leaf.dtype, **counted))
    return rows
