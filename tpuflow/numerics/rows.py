"""The rows of a numerics report: plain data, with the shares that are asked of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from tpuflow.numerics.measures import NO_MAGNITUDE, Counts, number


def share(part: int, whole: int) -> float:
    """part / whole; 0 of nothing."""
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFigures:
    """Figures of floating-point numbers of one type.

    `inf`, `nan`, `zeros`, `subnormal`: how many there are among `elements`. `underflow`: how many of the zeros ought not to be zero; an
    operation whose exact result is not zero, but too small for the type. `largest`, `smallest`: magnitudes of finite numbers, zeros
    aside; 0.0 if there are none. Operations that run several times (steps, trips of a loop) are counted each time.
    """

    elements: int
    inf: int = 0
    nan: int = 0
    zeros: int = 0
    subnormal: int = 0
    underflow: int = 0
    largest: float = 0.0
    smallest: float = 0.0

    @property
    def nonfinite(self) -> int:
        """Numbers that overflowed: infinities and NaNs."""
        return self.inf + self.nan

    @property
    def underflow_share(self) -> float:
        """Which share of the numbers that ought not to be zero became zero."""
        return share(self.underflow, self.elements - self.zeros + self.underflow)

    @property
    def subnormal_share(self) -> float:
        """Which share of the numbers other than zero are subnormal, and so have lost digits."""
        return share(self.subnormal, self.elements - self.zeros)

    def keys(self) -> list[str]:
        """The names of `as_dict`: a row can be read as a mapping."""
        return list(self.as_dict())

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, Any]:
        """Every field and share, what the row is first."""
        return {**_labels_first(asdict(self)), "underflow_share": self.underflow_share, "subnormal_share": self.subnormal_share}


_FIGURES = tuple(f.name for f in fields(TensorFigures))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow(TensorFigures):
    """All numbers of one kind that a layer has or makes, in one type.

    `layer`: the Flax module path; "loss" and "optimizer" are what belongs to no layer. `tensor`: "activation" (results of the operations
    of the forward pass), "activation gradient" and "parameter gradient" (of the backward pass, of the scaled loss if there is a loss
    scale), "parameter", "update" (what the optimizer adds to it), or "optimizer" (results of its other operations).
    """

    layer: str
    tensor: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow(TensorFigures):
    """One operation of the step, in the order of the program.

    `phase`: "forward", "backward" or "update". `source`: the user's line. `born`: results that are not finite though the operands are.
    `step` and `trip`: where that happened first, counted from 0; `trip` in the loop that it is in; None if it did not.
    """

    place: int
    loop: int
    primitive: str
    phase: str
    layer: str
    tensor: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    born: int = 0
    step: int | None = None
    trip: int | None = None

    def __str__(self) -> str:
        what = ", ".join(f"{n} {name}" for n, name in ((self.inf, "inf"), (self.nan, "NaN")) if n)
        shape = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        when = f" in step {self.step + 1}" if self.step else ""
        return f"{self.primitive} -> {shape} in {self.layer}, {self.phase}, at {self.source or 'an unknown line'}: {what or 'finite'}{when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """What becomes of the updates of one parameter.

    `with_gradient`: elements whose gradient is not zero. `lost`: those among them that keep every bit; `vanished`: those among them whose
    update is itself zero, because it underflowed. `elements` counts every step that had an update.
    """

    layer: str
    parameter: str
    dtype: str
    elements: int
    with_gradient: int
    lost: int
    vanished: int

    @property
    def lost_share(self) -> float:
        """Which share of the updates that have a gradient round to nothing."""
        return share(self.lost, self.with_gradient)

    def as_dict(self) -> dict[str, Any]:
        """Every field and the share."""
        return {**asdict(self), "lost_share": self.lost_share}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """What a loss scale would have done to the gradients of the backward pass in a type.

    `gradients`: those that are not zero in fp32. `kept`: those that would have been neither zero nor infinite, `normal`: those that
    would have kept all their digits, `overflow`: those that would have been infinite, so that the step is lost.
    """

    scale: float
    dtype: str
    gradients: int
    kept: int
    normal: int
    overflow: int

    @property
    def kept_share(self) -> float:
        """Which share of the gradients would have been kept."""
        return share(self.kept, self.gradients)

    @property
    def normal_share(self) -> float:
        """Which share of the gradients would have kept all their digits."""
        return share(self.normal, self.gradients)

    def as_dict(self) -> dict[str, Any]:
        """Every field and share."""
        return {**asdict(self), "kept_share": self.kept_share, "normal_share": self.normal_share}


def _labels_first(fields_: dict[str, Any]) -> dict[str, Any]:
    labels = {name: value for name, value in fields_.items() if name not in _FIGURES}
    return {**labels, **{name: fields_[name] for name in _FIGURES}}


def figures_of(counts: Counts, dtype: str) -> dict[str, Any]:
    """The fields of `TensorFigures` from what was measured of an array, over all trips."""
    largest, smallest = int(np.max(counts.largest, initial=0)), int(np.min(counts.smallest, initial=NO_MAGNITUDE))
    totals = {name: total(getattr(counts, name)) for name in ("elements", "inf", "nan", "zero", "subnormal", "underflow")}
    return {
        "zeros": totals.pop("zero"),
        **totals,
        "largest": number(largest, dtype),
        "smallest": 0.0 if smallest == NO_MAGNITUDE else number(smallest, dtype),
    }


def total(counts: Any) -> int:
    """The sum over trips."""
    return int(np.sum(counts, dtype=np.int64))


def added(rows: Sequence[Any]) -> Any:
    """One row from several of the same kind: counts added, magnitudes compared; everything else as in the first."""
    first = rows[0]
    sums = {f.name: sum(getattr(r, f.name) for r in rows) for f in fields(first) if f.name in _COUNTS}
    extremes = {}
    if isinstance(first, TensorFigures):
        extremes = {
            "largest": max(r.largest for r in rows),
            "smallest": min((r.smallest for r in rows if r.smallest), default=0.0),
        }
    return replace(first, **sums, **extremes)


_COUNTS = frozenset({
    "born", "elements", "gradients", "inf", "kept", "lost", "nan", "normal", "overflow", "subnormal", "underflow", "vanished",
    "with_gradient", "zeros",
})  # fmt: skip


def grouped(rows: Iterable[Any], *names: str) -> list[Any]:
    """The rows that agree in these fields, added up; in the order in which they first come."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return [added(group) for group in groups.values()]


def magnitude_text(value: float) -> str:
    """A magnitude in a table."""
    return "-" if value == 0.0 or math.isnan(value) else f"{value:.2e}"
