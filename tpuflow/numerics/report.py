"""What `tpuflow.check_numerics` hands back: rows of plain data, tables of text, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.numerics.rows import OperationRow, ScaleRow, TensorRow, UpdateRow, added, grouped, magnitude_text, share
from tpuflow.reports.files import PlainData

TENSORS = ("activation", "activation gradient", "parameter", "parameter gradient", "update", "optimizer")
"""The order of the rows of a layer."""


@dataclass(frozen=True, slots=True)
class NumericsReport(PlainData):
    """What happened to the numbers of one or more training steps in one precision, on the simulated device.

    `rows`: one for each layer, kind of tensor and type. `operations`: one for each floating-point operation. `updates`: one for each
    parameter. `scales`: one for each loss scale of the table. `losses`, `loss_scales` and `skipped`: one entry a step. Of a function that
    is no training step there are only rows and operations.
    """

    settings: Mapping[str, Any]
    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    rows: tuple[TensorRow, ...]
    operations: tuple[OperationRow, ...]
    updates: tuple[UpdateRow, ...]
    scales: tuple[ScaleRow, ...]

    @property
    def policy(self) -> str:
        """The name of the precision."""
        return self.settings["policy"]

    @property
    def first_nonfinite(self) -> OperationRow | None:
        """The first operation that made an infinity or a NaN out of finite numbers; None if all went well."""
        born = [o for o in self.operations if o.born]
        return min(born, key=lambda o: (o.step, o.loop, o.trip, o.place), default=None)

    @property
    def nonfinite(self) -> int:
        """Infinities and NaNs among all numbers."""
        return sum(row.nonfinite for row in self.rows)

    @property
    def underflows(self) -> tuple[OperationRow, ...]:
        """The operations whose results underflowed to zero, those with the largest share first."""
        return tuple(sorted((o for o in self.operations if o.underflow), key=lambda o: -o.underflow_share))

    @property
    def all_updates(self) -> UpdateRow | None:
        """The updates of all parameters together; None if no step had an update."""
        with_update = [u for u in self.updates if u.elements]
        return added(with_update) if with_update else None

    def row(self, layer: str, tensor: str) -> TensorRow:
        """The figures of one layer and kind of tensor, all types together.

        Raises:
          KeyError: there is none.
        """
        found = [r for r in self.rows if (r.layer, r.tensor) == (layer, tensor)]
        if not found:
            raise KeyError(f"no {tensor!r} of {layer!r}; there are: {', '.join(f'{r.tensor} of {r.layer}' for r in self.rows)}")
        return added(found)

    def total(self, tensor: str) -> TensorRow | None:
        """The figures of one kind of tensor over all layers and types."""
        found = [r for r in self.rows if r.tensor == tensor]
        return added(found) if found else None

    def table(self) -> str:
        """A row for each layer, kind of tensor and type."""
        heads = ("layer", "tensor", "type", "elements", "inf", "nan", "to zero", "subnormal", "smallest", "largest")
        return aligned(heads, [_cells(row) for row in self.rows], left=3)

    def scale_table(self) -> str:
        """What each loss scale would have kept of the gradients."""
        heads = ("loss scale", "gradients kept", "with all digits", "overflowing")
        cells = [(f"{s.scale:.0f}", percent(s.kept_share), percent(s.normal_share), str(s.overflow)) for s in self.scales]
        return aligned(heads, cells, left=0)

    def update_table(self) -> str:
        """What becomes of the updates of each parameter."""
        heads = ("layer", "parameter", "type", "with gradient", "rounds to nothing", "of it vanished")
        cells = [
            (u.layer, u.parameter, u.dtype, str(u.with_gradient), percent(u.lost_share), percent(share(u.vanished, u.with_gradient)))
            for u in self.updates
        ]
        return aligned(heads, cells, left=3)

    def explain(self) -> list[str]:
        """What a reader should know first, a sentence each."""
        return list(_sentences(self))

    def __str__(self) -> str:
        s = self.settings
        after = f" after {s['step']} steps" if "step" in s else ""
        steps = (
            f"{len(self.losses)} step{'s' * (len(self.losses) != 1)} of {s['batch_size']}, loss {self.losses[-1]:.6g}"
            if self.losses
            else ""
        )
        ran = steps or "one call"
        head = f"numerics of {s['model']} in {s['policy']}{after} on {s['chip']} ({s['engine']} engine, {s['fidelity']}): {ran}"
        parts = [head, self.table(), "\n".join(self.explain())]
        if self.scales:
            parts.append(f"loss scales, by the fp32 gradients of the same step, in {self.scales[0].dtype}:\n{self.scale_table()}")
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        first = self.first_nonfinite
        return {
            "settings": dict(self.settings),
            "losses": list(self.losses),
            "loss_scales": list(self.loss_scales),
            "skipped": list(self.skipped),
            "first_nonfinite": None if first is None else _operation(first),
            "explained": self.explain(),
            "rows": [row.as_dict() for row in self.rows],
            "updates": [row.as_dict() for row in self.updates],
            "scales": [row.as_dict() for row in self.scales],
            "operations": [_operation(row) for row in self.operations],
        }


@dataclass(frozen=True, slots=True)
class NumericsComparison(PlainData):
    """Reports of the same step on the same data in several precisions, in the order that was asked for."""

    reports: tuple[NumericsReport, ...]

    def __getitem__(self, policy: str) -> NumericsReport:
        """The report of a policy."""
        found = {report.policy: report for report in self.reports}
        if policy not in found:
            raise KeyError(f"no report of {policy!r}; there are: {', '.join(found)}")
        return found[policy]

    def __iter__(self) -> Iterator[NumericsReport]:
        return iter(self.reports)

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of the precisions."""
        return tuple(report.policy for report in self.reports)

    def table(self) -> str:
        """A row for each layer and kind of tensor; for each precision what overflowed, went to zero, and is subnormal."""
        rows = in_order([replace(r, dtype="") for report in self.reports for r in report.rows])
        places = [(r.layer, r.tensor) for r in rows]
        heads = ("layer", "tensor", *(f"{name}: inf+nan  to zero  subnormal" for name in self.policies))
        cells = [(*place, *(_short(report, *place) for report in self.reports)) for place in places]
        return aligned(heads, cells, left=2)

    def summary(self) -> str:
        """A row for each precision."""
        heads = ("policy", "loss", "inf+nan", "gradients to zero", "updates to nothing", "first non-finite operation")
        return aligned(heads, [_summary(report) for report in self.reports], left=1)

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, by policy."""
        return {report.policy: report.as_dict() for report in self.reports}


def timeline(reports: Sequence[NumericsReport]) -> str:
    """A row for each report of a training: what was wrong after so many steps."""
    heads = ("after step", "loss", "inf+nan", "gradients to zero", "updates to nothing", "first non-finite operation")
    return aligned(heads, [(str(r.settings["step"]), *_summary(r)[1:]) for r in reports], left=0)


def in_order(rows: Sequence[TensorRow]) -> tuple[TensorRow, ...]:
    """Added up by layer, kind and type; layers in the order in which they first come, kinds as in `TENSORS`."""
    layers = {row.layer: i for i, row in reversed(list(enumerate(rows)))}
    merged = grouped(rows, "layer", "tensor", "dtype")
    return tuple(sorted(merged, key=lambda r: (layers[r.layer], TENSORS.index(r.tensor))))


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Text columns, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in (heads, *rows)
    )


def percent(value: float) -> str:
    """A share in per cent: "0" only if it is nothing, "100%" only if it is everything."""
    if value in (0.0, 1.0):
        return "0" if value == 0.0 else "100%"
    return f"{min(max(100 * value, 0.01), 99.99):.2f}%"


def _cells(r: TensorRow) -> tuple[str, ...]:
    counts = (str(r.elements), str(r.inf), str(r.nan), percent(r.underflow_share), percent(r.subnormal_share))
    return (r.layer, r.tensor, r.dtype, *counts, magnitude_text(r.smallest), magnitude_text(r.largest))


def _short(report: NumericsReport, layer: str, tensor: str) -> str:
    found = [r for r in report.rows if (r.layer, r.tensor) == (layer, tensor)]
    if not found:
        return "-"
    r = added(found)
    return f"{r.nonfinite}  {percent(r.underflow_share):>7}  {percent(r.subnormal_share):>9}"


def _summary(report: NumericsReport) -> tuple[str, ...]:
    gradients = [r for r in report.rows if "gradient" in r.tensor]
    lost, first = report.all_updates, report.first_nonfinite
    return (
        report.policy,
        f"{report.losses[-1]:.6g}",
        str(report.nonfinite),
        percent(added(gradients).underflow_share) if gradients else "-",
        "skipped" if any(report.skipped) and lost is None else "-" if lost is None else percent(lost.lost_share),
        "none" if first is None else f"{first.primitive} in {first.layer}, {first.phase}",
    )


def _sentences(report: NumericsReport) -> Iterator[str]:
    first = report.first_nonfinite
    yield f"first non-finite operation: {first if first is not None else 'none'}"
    for name in ("activation", "activation gradient", "parameter gradient"):
        row = report.total(name)
        if row is not None and row.underflow:
            worst = max((o for o in report.underflows if o.tensor == name), key=lambda o: o.underflow)
            yield (
                f"{percent(row.underflow_share)} of the {name}s underflow to zero; most of them in {worst.primitive} of {worst.layer} "
                f"at {worst.source}"
            )
    if any(report.skipped):
        steps = ", ".join(str(i + 1) for i, yes in enumerate(report.skipped) if yes)
        yield f"skipped for overflow, so nothing was updated: step {steps} (loss scale {report.loss_scales[0]:g})"
    updates = report.all_updates
    if updates is not None:
        yield _update_sentence(updates)
    kept = [s for s in report.scales if not s.overflow]
    if kept:
        best = max(kept, key=lambda s: (s.kept, s.normal))
        share_kept = percent(best.kept_share)
        yield f"a loss scale of {best.scale:.0f} would have kept {share_kept} of the gradients in {best.dtype}, without overflow"


def _update_sentence(u: UpdateRow) -> str:
    """Why training is slow, if it is: how much of what is to be learnt changes no bit."""
    below = u.lost - min(u.vanished, u.lost)
    return (
        f"{percent(u.lost_share)} of the parameter updates round to nothing: of {u.with_gradient} elements with a gradient, {u.lost} keep "
        f"every bit; {below} because the update is less than half a unit in the last place of the parameter, {u.lost - below} because it "
        f"is itself zero"
    )


def _operation(row: OperationRow) -> dict[str, Any]:
    return {**row.as_dict(), "shape": list(row.shape)}
