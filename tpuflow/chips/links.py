"""What joining several chips takes: closed forms of collectives over the axes of a mesh.

Chips are joined in up to three levels, each with its own bandwidth: `link_chips` of them by links of their own (a torus of `link_axes`
axes, rings on every axis in both directions at once), `host_chips` by their host, any number by the network. A sum over a level of n
groups is scattered, summed and gathered: it moves 2 (n - 1) / n of the data at that level's bandwidth, and leaves each chip 1 / n of
them for the next. An axis of fewer than `link_ring_chips` has no link from its end back to its beginning: what half of a ring's chips get
from either side comes from one side alone, in twice the time. Links sustain `link_efficiency` of their bandwidth. A hop's latency goes by
for every step of the way to the farthest chip, and `collective_seconds` to begin and end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.chips.chip import Chip
from tpuflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Hop:
    """One level of an axis of chips: `groups` of them around rings on `axes` axes (0: a switch), bytes a second that a chip sends over all
    of these in both directions, and a step's latency; `ways` is 1 for rings, 2 for rows that do not close."""

    groups: int
    rate: float
    axes: int
    step_seconds: float
    ways: int = 1

    @property
    def side(self) -> int:
        """Chips around one ring."""
        return math.ceil(self.groups ** (1 / max(1, self.axes)))

    @property
    def latency_seconds(self) -> float:
        """Of a message to the farthest chip: half around every ring, or along every row."""
        return max(1, self.axes) * (self.side / 2 if self.ways == 1 else self.side - 1) * self.step_seconds


def collective_seconds(
    chip: Chip, kind: str, data_bytes: float, sizes: Sequence[int], axes: Sequence[int], distance: int = 1, joined: Sequence[bool] = ()
) -> float:
    """Seconds of a collective that sends `data_bytes` from each chip over the mesh axes `axes` (by number) of a mesh of these sizes; none
    over one chip.

    The mesh's axes of several chips share the torus evenly, chips of the last axis side by side; an axis that goes beyond what links
    join goes on over the host, then the network. distance: of a permute, how far around its axis a message goes at most. joined: of each
    axis whether it and the one before it are parts of one row of chips (empty: none is).

    Raises:
      ConfigError: the chip's row does not say how so many are joined.
    """
    seconds, left = 0.0, data_bytes
    rows = _rows(sizes, joined)
    for stretch in _stretches(axes, rows):
        for hop in _hops(chip, sizes, rows, stretch):
            if hop.rate <= 0:
                raise ConfigError(
                    f"chip {chip.name!r} does not say what joins the {math.prod(sizes)} chips of a mesh {list(sizes)}; give its row "
                    "link_chips and *_bytes_per_second."
                )
            seconds += _SECONDS[kind](hop, left, distance)
            left = _LEFT[kind](left, hop.groups)
    return seconds + chip.collective_seconds if seconds else 0.0


def sending_seconds(
    chip: Chip, kind: str, data_bytes: float, sizes: Sequence[int], axes: Sequence[int], distance: int = 1, joined: Sequence[bool] = ()
) -> float:
    """For how long of its `collective_seconds` a collective has the links to itself: while one waits for what comes around, others send."""
    return collective_seconds(_without_latency(chip), kind, data_bytes, sizes, axes, distance, joined)


@functools.lru_cache(maxsize=8)
def _without_latency(chip: Chip) -> Chip:
    return replace(chip, hop_seconds=0.0, collective_seconds=0.0)


def _rows(sizes: Sequence[int], joined: Sequence[bool]) -> list[range]:
    """Of each mesh axis, the axes that are one row of chips with it."""
    starts = [a for a in range(len(sizes)) if not (joined and joined[a])]
    rows = [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]
    return [row for row in rows for _ in row]


def _stretches(axes: Sequence[int], rows: Sequence[range]) -> list[range]:
    """Axes one after the other, but those that go on where the one before ended, in one row, together."""
    found: list[range] = []
    for a in axes:
        if found and found[-1].stop == a and a in rows[found[-1].start]:
            found[-1] = range(found[-1].start, a + 1)
        else:
            found.append(range(a, a + 1))
    return found


def _hops(chip: Chip, sizes: Sequence[int], rows: Sequence[range], stretch: range) -> Iterator[Hop]:
    """The levels of a ring over the axes of a stretch. Where it is a part of a row, its neighbours are `apart` links from each other,
    which as many rings share; and it has no link from its end back to its begin if the row goes on there, or does not close."""
    row = rows[stretch.start]
    apart = math.prod(sizes[a] for a in row if a >= stretch.stop)
    inner = math.prod(sizes[stretch.stop :])  # chips between neighbours
    several = len({r for r in rows if math.prod(sizes[a] for a in r) > 1 and math.prod(sizes[r.stop :]) < chip.link_chips})
    share = min(1.0, 1 / several) if several else 1.0
    whole = Hop(min(math.prod(sizes[a] for a in row), chip.link_chips), 0.0, int(max(1.0, chip.link_axes * share)), 0.0)
    ways = 2 if stretch.start > row.start or whole.side < chip.link_ring_chips else 1
    joined, size = 1, math.prod(sizes[a] for a in stretch)
    reaches = (
        (chip.link_chips // inner, chip.link_efficiency * chip.link_bytes_per_second * share / apart, whole.axes, apart, ways),
        (chip.host_chips // inner, chip.host_bytes_per_second, 0, 1, 1),
        (size, chip.network_bytes_per_second, 0, 1, 1),
    )
    for most, rate, axes, links, ways in reaches:
        reach = min(size, most)
        if reach > joined:
            groups = math.ceil(reach / joined)
            yield Hop(groups, rate, axes, links * chip.hop_seconds, ways)
            joined *= groups


def _scatter(hop: Hop, data_bytes: float, distance: int) -> float:
    return hop.ways * (hop.groups - 1) / hop.groups * data_bytes / hop.rate + hop.latency_seconds


def _gather(hop: Hop, data_bytes: float, distance: int) -> float:
    return _scatter(hop, hop.groups * data_bytes, distance)


def _sum(hop: Hop, data_bytes: float, distance: int) -> float:
    return 2 * _scatter(hop, data_bytes, distance)


def _exchange(hop: Hop, data_bytes: float, distance: int) -> float:
    """Around a ring a message goes a quarter of it on average, and each chip sends in both directions; of a row that does not close, the
    links in the middle carry twice as much."""
    if hop.axes == 0:
        return (hop.groups - 1) / hop.groups * data_bytes / hop.rate + hop.step_seconds
    return hop.ways * hop.axes * (hop.side**2 // 4) / hop.side * data_bytes / hop.rate + hop.latency_seconds


def _shift(hop: Hop, data_bytes: float, distance: int) -> float:
    """One direction of one axis; every link carries the messages of all chips on their way, or back along a row that does not close."""
    if hop.axes == 0:
        return data_bytes / hop.rate + hop.step_seconds
    far = min(distance, hop.side)
    return far * (data_bytes / (hop.rate / hop.axes / 2) + hop.step_seconds)


_SECONDS: Mapping[str, Callable[[Hop, float, int], float]] = {
    "all_reduce": _sum, "reduce_scatter": _scatter, "all_gather": _gather, "all_to_all": _exchange, "permute": _shift,
}  # fmt: skip
_LEFT: Mapping[str, Callable[[float, int], float]] = {
    "all_reduce": lambda left, groups: left / groups,
    "reduce_scatter": lambda left, groups: left / groups,
    "all_gather": lambda left, groups: left * groups,
    "all_to_all": lambda left, groups: left,
    "permute": lambda left, groups: left,
}
"""Bytes that are left for the next level."""
