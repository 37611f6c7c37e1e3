"""Loads whose positions are known now and evenly spaced along every axis: one pad, shared by all such loads of a kernel, and one slice.

Overlapping windows load one buffer many times. A pad for each would be computed again and again, and a slice an axis at a time makes XLA
keep what lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from tpuflow.device.fast.positions import Positions
from tpuflow.isa.instruction import Window


@dataclass(frozen=True, slots=True)
class Stride:
    """Positions start, start + step, ... (`length` of them, step > 0) along a view axis, read from the last one if `backwards`."""

    start: int
    step: int
    length: int
    backwards: bool

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + (self.length - 1) * self.step + 1


def spacing(where: Positions) -> int:
    """The distance of neighbouring positions; 0 if they are not known now or not evenly spaced."""
    progression = where.progression
    return progression[1] if where.known and progression is not None else 0


def strides(wheres: Sequence[Positions]) -> tuple[Stride, ...] | None:
    """The positions of every axis as strides; None if some are not known now or not evenly spaced."""
    found = []
    for where in wheres:
        step = spacing(where)
        if not step:
            return None
        found.append(Stride(where.ends()[0] + where.offset, abs(step), where.length, step < 0))
    return tuple(found)


def spread_extents(window: Window) -> tuple[int, ...]:
    """The positions that each view axis spans once its elements are `dilation` apart."""
    return tuple((a.extent - 1) * a.dilation + 1 if a.extent else 0 for a in window.axes)


Margins = tuple[tuple[int, int], ...]


def margins(boxes: Sequence[Sequence[Stride]], spans: Sequence[int]) -> Margins:
    """By how much the boxes leave a view of those spans, at both ends of every axis."""
    low = [max(0, *(-box[i].start for box in boxes)) for i in range(len(spans))]
    high = [max(0, *(box[i].stop - n for box in boxes)) for i, n in enumerate(spans)]
    return tuple(zip(low, high, strict=True))


def padded(view: Any, window: Window, around: Margins, fill: Any) -> Any:
    """The view with its elements spread out and `fill` between and around them."""
    config = [(low, high, a.dilation - 1) for (low, high), a in zip(around, window.axes, strict=True)]
    return lax.pad(view, fill, config) if any(map(any, config)) else view


def cut(x: Any, box: Sequence[Stride], around: Margins) -> Any:
    """The box of a padded view."""
    starts = [s.start + low for s, (low, _) in zip(box, around, strict=True)]
    stops = [s.stop + low for s, (low, _) in zip(box, around, strict=True)]
    steps = [s.step for s in box]
    if any(starts) or tuple(stops) != x.shape or {*steps} - {1}:
        x = lax.slice(x, starts, stops, steps)
    backwards = tuple(i for i, s in enumerate(box) if s.backwards)
    return lax.rev(x, backwards) if backwards else x


@dataclass(frozen=True, slots=True)
class Inside:
    """What a padded array was made of: `array`, and zeros, so many before and after it along each axis."""

    array: Any
    around: Margins


def inside(view: Any, window: Window, box: Sequence[Stride]) -> Inside | None:
    """The elements that a box of neighbours takes from a view, and what lies around them; None if nothing does, or between them."""
    around = tuple((max(0, -s.start), max(0, s.stop - n)) for s, n in zip(box, view.shape, strict=True))
    apart = any(
        s.backwards or (s.length > 1 and s.step > 1) or not (s.stop > 0 and s.start < n) for s, n in zip(box, view.shape, strict=True)
    )
    if not any(map(any, around)) or apart or window.fill != 0 or any(a.dilation > 1 for a in window.axes):
        return None
    starts, stops = [max(0, s.start) for s in box], [min(s.stop, n) for s, n in zip(box, view.shape, strict=True)]
    whole = not any(starts) and tuple(stops) == view.shape
    return Inside(view if whole else lax.slice(view, starts, stops), around)
