"""The time of collectives over the axes of a mesh, in closed form.

Chips are connected in up to three levels, each with its own bandwidth: `link_chips` of them by links of their own (a torus of `link_axes`
axes, with rings on every axis in both directions at once), `host_chips` by their host, any number by the network. An all-reduce over a
level of n groups is a reduce-scatter and an all-gather: it moves 2 (n - 1) / n of the data at that level's bandwidth, and leaves each chip
with 1 / n of them for the next level. An all-gather begins at the outermost level, where there is least of it. An axis of fewer than
`link_ring_chips` is a line without a wraparound link: all data come from one side, not half of them from either, in twice the time. Links
sustain `link_efficiency` of their bandwidth. To this add the latency of
the hops to the farthest chip, and `collective_seconds` to begin and end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.chips.chip import Chip
from tpuflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the connections along a mesh axis: `groups` of chips in rings on `axes` torus axes (0: behind a switch).

    `rate` is the bytes a second that a chip sends over all of these axes in both directions, `step_seconds` the latency of one step. `ways`
    is 1 for rings, 2 for lines, whose data go one way only.
    """

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
        """The latency of a message to the farthest chip: half around every ring, or along every line."""
        return max(1, self.axes) * (self.side / 2 if self.ways == 1 else self.side - 1) * self.step_seconds


def collective_seconds(
    chip: Chip, kind: str, data_bytes: float, sizes: Sequence[int], axes: Sequence[int], distance: int = 1, joined: Sequence[bool] = ()
) -> float:
    """Seconds of a collective that sends `data_bytes` from each chip over the mesh axes `axes` (by number) of a mesh of these sizes; 0 over
    one chip.

    The mesh axes with several chips share the bandwidth of the torus evenly, consecutive ones of one collective together, and turn into
    another axis of it where they are longer than it is wide; chips along the last axis are neighbours. An axis with more chips than links
    connect continues over the host, then over the network. distance: of a permute, the most hops around its axis that a message takes.
    joined: for each axis, whether it and the one before it are parts of one row of chips (empty: none is).

    Raises:
      ConfigError: the chip's row has no bandwidth for connecting so many chips.
    """
    seconds, left = 0.0, data_bytes
    rows = _rows(sizes, joined)
    inwards = [level for stretch in reversed(_stretches(axes)) for level in _levels(chip, sizes, rows, stretch)]
    for level in reversed(inwards) if kind in GROWING else inwards:
        if level.rate <= 0:
            raise ConfigError(
                f"chip {chip.name!r} does not say what joins the {math.prod(sizes)} chips of a mesh {list(sizes)}; give its row "
                "link_chips and *_bytes_per_second."
            )
        seconds += _SECONDS[kind](level, left, distance)
        left = _LEFT[kind](left, level.groups)
    return seconds + chip.collective_seconds if seconds else 0.0


def sending_seconds(
    chip: Chip, kind: str, data_bytes: float, sizes: Sequence[int], axes: Sequence[int], distance: int = 1, joined: Sequence[bool] = ()
) -> float:
    """The part of `collective_seconds` in which a collective occupies the links: others can send while it only waits for latency."""
    return collective_seconds(_without_latency(chip), kind, data_bytes, sizes, axes, distance, joined)


@functools.lru_cache(maxsize=8)
def _without_latency(chip: Chip) -> Chip:
    return replace(chip, hop_seconds=0.0, collective_seconds=0.0)


def _rows(sizes: Sequence[int], joined: Sequence[bool]) -> list[range]:
    """For each mesh axis, the range of axes that are one row of chips with it."""
    starts = [a for a in range(len(sizes)) if not (joined and joined[a])]
    rows = [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]
    return [row for row in rows for _ in row]


def _stretches(axes: Sequence[int]) -> list[range]:
    """The axes as ranges of consecutive ones."""
    found: list[range] = []
    for a in sorted(axes):
        if found and found[-1].stop == a:
            found[-1] = range(found[-1].start, a + 1)
        else:
            found.append(range(a, a + 1))
    return found


def _levels(chip: Chip, sizes: Sequence[int], rows: Sequence[range], stretch: range) -> Iterator[Level]:
    """The levels of a ring over the axes of a range, from the links outwards. If these are the outer part of a row of chips, neighbours in
    the ring are `apart` links from each other, which `apart` rings share. The ring is a line if it is an inner part of its row, or the row
    is a line. Several rows that a range goes over are one, with the bandwidth of all."""
    row = range(rows[stretch.start].start, rows[stretch.stop - 1].stop)
    apart = math.prod(sizes[a] for a in row if a >= stretch.stop)
    inner = math.prod(sizes[stretch.stop :])  # chips between neighbours
    linked = {r for r in rows if math.prod(sizes[a] for a in r) > 1 and math.prod(sizes[r.stop :]) < chip.link_chips}
    share = min(1.0, max(1, sum(r.start in row for r in linked)) / len(linked)) if linked else 1.0
    whole = Level(min(math.prod(sizes[a] for a in row), chip.link_chips), 0.0, int(max(1.0, chip.link_axes * share)), 0.0)
    torus_axes = max(whole.axes, _torus_axes(chip, whole.groups))
    ways = 2 if stretch.start > row.start or whole.side < chip.link_ring_chips else 1
    joined, size = 1, math.prod(sizes[a] for a in stretch)
    reaches = (
        (chip.link_chips // inner, chip.link_efficiency * chip.link_bytes_per_second * share / apart, torus_axes, apart, ways),
        (chip.host_chips // inner, chip.host_bytes_per_second, 0, 1, 1),
        (size, chip.network_bytes_per_second, 0, 1, 1),
    )
    for most, rate, axes, links, ways in reaches:
        reach = min(size, most)
        if reach > joined:
            groups = math.ceil(reach / joined)
            yield Level(groups, rate, axes, links * chip.hop_seconds, ways)
            joined *= groups


def _torus_axes(chip: Chip, groups: int) -> int:
    """The axes of the torus that a row of so many chips needs: one that is longer than the torus is wide goes on along the next."""
    wide = chip.link_chips ** (1 / chip.link_axes)
    return next(axes for axes in range(1, chip.link_axes + 1) if groups <= wide**axes * (1 + 1e-9) or axes == chip.link_axes)


def _scatter(level: Level, data_bytes: float, distance: int) -> float:
    return level.ways * (level.groups - 1) / level.groups * data_bytes / level.rate + level.latency_seconds


def _gather(level: Level, data_bytes: float, distance: int) -> float:
    return _scatter(level, level.groups * data_bytes, distance)


def _sum(level: Level, data_bytes: float, distance: int) -> float:
    return 2 * _scatter(level, data_bytes, distance)


def _exchange(level: Level, data_bytes: float, distance: int) -> float:
    """An all-to-all: a message goes a quarter of the way around a ring on average, and chips send in both directions. On a line, the links
    in the middle carry twice as much."""
    if level.axes == 0:
        return (level.groups - 1) / level.groups * data_bytes / level.rate + level.step_seconds
    return level.ways * level.axes * (level.side**2 // 4) / level.side * data_bytes / level.rate + level.latency_seconds


def _shift(level: Level, data_bytes: float, distance: int) -> float:
    """A permute uses one direction of one axis; every link carries the messages of all chips that pass it."""
    if level.axes == 0:
        return data_bytes / level.rate + level.step_seconds
    far = min(distance, level.side)
    return far * (data_bytes / (level.rate / level.axes / 2) + level.step_seconds)


_SECONDS: Mapping[str, Callable[[Level, float, int], float]] = {
    "all_reduce": _sum, "reduce_scatter": _scatter, "all_gather": _gather, "all_to_all": _exchange, "permute": _shift,
}  # fmt: skip
_LEFT: Mapping[str, Callable[[float, int], float]] = {
    "all_reduce": lambda left, groups: left / groups,
    "reduce_scatter": lambda left, groups: left / groups,
    "all_gather": lambda left, groups: left * groups,
    "all_to_all": lambda left, groups: left,
    "permute": lambda left, groups: left,
}
"""(bytes of a chip, groups of this level) -> bytes of a chip at the next level."""
GROWING = frozenset(("all_gather",))
"""Kinds of which a chip has more from level to level: they begin at the outermost, all others at the links."""
