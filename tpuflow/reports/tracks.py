"""The tracks of a Chrome trace that are derived from the kernels: slices of phases and module paths, and counters over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slice:
    """A named interval, in picoseconds; slices of one track are disjoint or nested."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A kernel's interval, and its path from the outermost part: ("forward", "LeNet5", "conv1")."""

    begin: int
    end: int
    path: Sequence[str]


def nested(stretches: Iterable[Stretch]) -> Iterator[Slice]:
    """Nested slices: one for each part of a path, over all consecutive kernels that share the path up to it, without a gap in time.

    They are sorted by begin, outer ones first, as trace viewers expect.
    """
    done: list[tuple[int, Slice]] = []  # (depth, slice)
    open_: list[tuple[str, int]] = []  # (name, begin) of each depth
    last = 0
    for s in stretches:
        shared = _shared([name for name, _ in open_], s.path) if s.begin == last else 0
        done += [(depth, Slice(*open_[depth], last)) for depth in range(shared, len(open_))]
        open_ = [*open_[:shared], *((name, s.begin) for name in s.path[shared:])]
        last = s.end
    done += [(depth, Slice(*one, last)) for depth, one in enumerate(open_)]
    return (one for _, one in sorted(done, key=lambda pair: (pair[1].begin, pair[0])))


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the common prefix of two paths."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class Counters:
    """Values over time, a track for each name and each key of its values; `points` are (name, picoseconds, values).

    A value that does not change adds no point, and of several values at one time only the last is kept.
    """

    points: list[tuple[str, int, Mapping[str, float]]] = field(default_factory=list)
    _latest: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, at: int, values: Mapping[str, float]) -> None:
        """Set a counter's values from a time on. The times of one counter must not decrease."""
        latest = self._latest.get(name)
        if latest is not None and self.points[latest][1] == at:
            self.points[latest] = name, at, values
        elif latest is None or self.points[latest][2] != values:
            self._latest[name] = len(self.points)
            self.points.append((name, at, values))
