"""Loads of static strided boxes: one pad, shared by all such loads of a kernel from one view, and one slice for each.

A box has static positions, evenly spaced along every axis. Overlapping windows load one buffer many times: a pad for each would be
computed again and again, and slicing one axis after the other makes XLA materialize the intermediate arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The distance of neighbouring positions; 0 if they are not static or not evenly spaced."""
    progression = where.progression
    return progression[1] if where.known and progression is not None else 0


def strides(wheres: Sequence[Positions]) -> tuple[Stride, ...] | None:
    """The positions of every axis as strides; None if some are not static or not evenly spaced."""
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
    """The padding that the boxes need together, at both ends of every axis of a view that spans so many positions along each."""
    low = [max(0, *(-box[i].start for box in boxes)) for i in range(len(spans))]
    high = [max(0, *(box[i].stop - n for box in boxes)) for i, n in enumerate(spans)]
    return tuple(zip(low, high, strict=True))


def padded(view: Any, window: Window, around: Margins, fill: Callable[[], Any]) -> Any:
    """The view with its elements spread out and `fill` between and around them."""
    config = [(low, high, a.dilation - 1) for (low, high), a in zip(around, window.axes, strict=True)]
    return lax.pad(view, fill(), config) if any(map(any, config)) else view


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
class Unpadded:
    """A padded array before it was padded: `array`, and how many zeros are padded before and after it along each axis (`around`)."""

    array: Any
    around: Margins


def unpadded(view: Any, window: Window, box: Sequence[Stride]) -> Unpadded | None:
    """A box that leaves the view, without its padding: the elements inside the view, and the zeros around them. None if it needs no
    padding, or has any between its elements, or is not contiguous."""
    around = tuple((max(0, -s.start), max(0, s.stop - n)) for s, n in zip(box, view.shape, strict=True))
    apart = any(
        s.backwards or (s.length > 1 and s.step > 1) or not (s.stop > 0 and s.start < n) for s, n in zip(box, view.shape, strict=True)
    )
    if not any(map(any, around)) or apart or window.fill != 0 or any(a.dilation > 1 for a in window.axes):
        return None
    starts, stops = [max(0, s.start) for s in box], [min(s.stop, n) for s, n in zip(box, view.shape, strict=True)]
    whole = not any(starts) and tuple(stops) == view.shape
    return Unpadded(view if whole else lax.slice(view, starts, stops), around)
