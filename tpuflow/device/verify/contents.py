"""The abstract domain of the dataflow check: which buffers of HBM, VMEM and CMEM are valid, wholly or in part.

A `Contents` is also the effect of blocks on memory: what is valid after them as a function of what was valid before. Buffers that share
addresses exclude one another, so valid buffers are disjoint ranges of addresses, kept in order; a write invalidates those that it overlaps.
No cost here depends on the size of a buffer; a lookup is a bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpuflow.device.verify.footprint import Box, cover
from tpuflow.isa.program import Buffer


@dataclass(slots=True)
class Content:
    """A buffer's content after some blocks: what it held before if `kept`, and the parts stored since (`whole`: all of it)."""

    kept: bool = False
    parts: frozenset[Box] = frozenset()
    whole: bool = False
    _covered: bool | None = None

    def add(self, box: Box | None) -> Content:
        """This and one more part (None: one that is not known)."""
        return self if self.whole or box is None else Content(self.kept, self.parts | {box}, box.full)

    def after(self, earlier: Content) -> Content:
        """This after an earlier content."""
        if self.whole or not self.kept:
            return self
        return Content(earlier.kept, earlier.parts | self.parts) if self.parts and not earlier.whole else earlier

    def is_whole(self, elems: int) -> bool:
        """Whether everything is stored, whatever was held before."""
        if self._covered is None:
            self._covered = self.whole or (bool(self.parts) and cover(tuple(self.parts), elems))
        return self._covered


NOTHING, SAME, WHOLE = Content(), Content(kept=True), Content(whole=True)


@dataclass(slots=True)
class Spans:
    """Disjoint stretches of bytes [start, end), ascending."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def meeting(self, low: int, high: int) -> tuple[int, int]:
        """Numbers [first, last) of the stretches that share a byte with [low, high)."""
        return bisect_right(self.ends, low), bisect_left(self.starts, high)

    def cover(self, low: int, high: int) -> None:
        """Add a stretch, joined with those that it meets."""
        first, last = self.meeting(low, high)
        if first < last:
            low, high = min(low, self.starts[first]), max(high, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [low], [high]


class Contents:
    """Contents of buffers of one byte or more. A buffer that is not listed holds nothing if something in `lost` was written over it,
    else what it held before."""

    def __init__(self, buffers: Sequence[Buffer]):
        self.buffers = buffers
        self.spans = Spans()
        self.held: list[tuple[int, Content]] = []  # one a span: a buffer and its content
        self.lost = Spans()

    def copy(self) -> Contents:
        """A copy, to modify."""
        made = Contents(self.buffers)
        made.spans, made.held = Spans(self.spans.starts.copy(), self.spans.ends.copy()), self.held.copy()
        made.lost = Spans(self.lost.starts.copy(), self.lost.ends.copy())
        return made

    def forget(self) -> None:
        """Make the content before the blocks invalid: at the start of a Program nothing is valid."""
        self.lost = Spans([0], [max((b.span[1] for b in self.buffers), default=0)])

    def of(self, buffer: int) -> Content:
        """What a buffer holds."""
        low, high = self.buffers[buffer].span
        first, last = self.spans.meeting(low, high)
        if last - first == 1 and self.held[first][0] == buffer:
            return self.held[first][1]
        first, last = self.lost.meeting(low, high)
        return NOTHING if first < last else SAME

    def is_whole(self, buffer: int) -> bool:
        """Whether all of a buffer is held (always, if it has no bytes)."""
        b = self.buffers[buffer]
        return b.bytes == 0 or self.of(buffer).is_whole(b.elems)

    def put(self, buffer: int, content: Content) -> None:
        """The buffer now holds this; what shares bytes with it, nothing."""
        low, high = self.buffers[buffer].span
        if low == high:
            return
        self._take_out(low, high)
        if content is not NOTHING:
            at = bisect_left(self.spans.starts, low)
            self.spans.starts.insert(at, low)
            self.spans.ends.insert(at, high)
            self.held.insert(at, (buffer, content))

    def store(self, buffer: int, box: Box | None) -> None:
        """A part of a buffer is written (None: one that is not known)."""
        if self.buffers[buffer].bytes and not (box is not None and box.empty):
            self.put(buffer, self.of(buffer).add(box))

    def lose(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Something that is no buffer is written over these bytes."""
        for low, high in stretches:
            self._take_out(low, high)

    def then(self, later: Contents) -> None:
        """Apply the effect `later` of further blocks."""
        found = [(buffer, content.after(self.of(buffer))) for buffer, content in later.held]
        self.lose(zip(later.lost.starts, later.lost.ends, strict=True))
        for buffer, content in found:
            self.put(buffer, content)

    def _take_out(self, low: int, high: int) -> None:
        first, last = self.spans.meeting(low, high)
        del self.spans.starts[first:last], self.spans.ends[first:last], self.held[first:last]
        self.lost.cover(low, high)


def any_trips(once: Contents) -> Contents:
    """The effect of any number of trips, none included, of blocks with the effect `once`.

    A buffer that a trip keeps, or stores whole, holds what it held before; any other counts as not valid.
    """
    made = once.copy()
    made.spans, made.held = Spans(), []
    for buffer, content in once.held:
        if content.kept or content.is_whole(once.buffers[buffer].elems):
            made.put(buffer, SAME)
    return made


def either(branches: Sequence[Contents]) -> Contents:
    """The effect of one of several branches, whichever is taken: what all of them hold."""
    made = Contents(branches[0].buffers)
    lows, highs = (sorted(edge for b in branches for edge in getattr(b.lost, name)) for name in ("starts", "ends"))
    for b in branches:
        for low, high in zip(b.lost.starts, b.lost.ends, strict=True):
            made.lost.cover(low, high)
    found: dict[int, list[Content]] = {}
    for b in branches:
        for buffer, content in b.held:
            found.setdefault(buffer, []).append(content)
    for buffer, contents in found.items():
        low, high = made.buffers[buffer].span
        overwriting = bisect_left(lows, high) - bisect_right(highs, low)  # stretches that some branch writes over this buffer
        if overwriting == len(contents):  # all of them where the branch holds the buffer itself
            made.put(buffer, _met([*contents, *([SAME] if len(contents) < len(branches) else [])], made.buffers[buffer].elems))
    return made


def _met(contents: Iterable[Content], elems: int) -> Content:
    """What all of these hold."""
    partial = [c for c in contents if not c.is_whole(elems)]
    if not partial:
        return WHOLE
    parts = frozenset.intersection(*(c.parts for c in partial))
    kept = all(c.kept for c in partial)
    return Content(kept, parts) if kept or parts else NOTHING
