"""What a trace has beside the work itself: slices of phases and module paths around kernels, and counters over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slice:
    """A name from one time to another, in picoseconds; slices of one row lie one after the other or one within the other."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A kernel's time, and where it belongs, from the outside in: ("forward", "LeNet5", "conv1")."""

    begin: int
    end: int
    path: Sequence[str]


def nested(stretches: Iterable[Stretch]) -> Iterator[Slice]:
    """One slice for every part of a path, from the first to the last of the stretches that share it without a gap.

    In order of begin, the outer ones first, as viewers of traces expect.
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
    """How many names two paths begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class Counters:
    """Values over time, a track for each name and each key of its values; `points` are (name, picoseconds, values).

    What does not change is no point, and of several values at one time the last one counts.
    """

    points: list[tuple[str, int, Mapping[str, float]]] = field(default_factory=list)
    _latest: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, at: int, values: Mapping[str, float]) -> None:
        """From this time on a counter has these values. Times of one counter do not go back."""
        latest = self._latest.get(name)
        if latest is not None and self.points[latest][1] == at:
            self.points[latest] = name, at, values
        elif latest is None or self.points[latest][2] != values:
            self._latest[name] = len(self.points)
            self.points.append((name, at, values))
