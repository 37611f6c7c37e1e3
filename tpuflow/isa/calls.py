"""Calls of the host's Python from a program (`jax.debug.print`, `jax.debug.callback`): what is called with which items of its outfeeds.

The first outfeed ports of a Program with calls carry their arrays, in the order of the calls; one item of each port is what one run of the
step sends. Python functions have no place in a file: a Program with calls runs where it was compiled and cannot be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

HOST_CALL = "tpuflow_host_call"
"""In a module of StableHLO, the target of a custom call without results, with side effects, of the host function numbered in its
`backend_config` (a string)."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """`function(*arrays)` on the host, written at the user's line `source`; it takes `operands` arrays."""

    function: Callable[..., Any]
    operands: int
    source: str

    @property
    def arrays(self) -> int:
        """How many are sent for it: one at least, as the host counts runs of the step by them."""
        return max(1, self.operands)

    def deliver(self, arrays: Iterator[Any]) -> None:
        """Call it with the next arrays."""
        self.function(*list(islice(arrays, self.arrays))[: self.operands])


@dataclass(frozen=True, slots=True)
class EachTrip:
    """Calls of every trip of a counted loop; their arrays are stacked, [trips, ...], by place: the trips run backwards if `reverse`."""

    calls: tuple[Call, ...]
    trips: int
    reverse: bool

    @property
    def arrays(self) -> int:
        """How many they take."""
        return count(self.calls)

    def deliver(self, arrays: Iterator[Any]) -> None:
        """The calls of the first trip, of the second, ..."""
        stacked = list(islice(arrays, self.arrays))
        for i in reversed(range(self.trips)) if self.reverse else range(self.trips):
            deliver(self.calls, [x[i] for x in stacked])


@dataclass(frozen=True, slots=True)
class OneOf:
    """Calls of the branch that was taken. The first array says which (clamped to those there are); the others are every branch's."""

    branches: tuple[tuple[Call, ...], ...]

    @property
    def arrays(self) -> int:
        """How many they take."""
        return 1 + sum(map(count, self.branches))

    def deliver(self, arrays: Iterator[Any]) -> None:
        """The calls of one branch."""
        taken = min(max(int(next(arrays)), 0), len(self.branches) - 1)
        for i, calls in enumerate(self.branches):
            given = list(islice(arrays, count(calls)))
            if i == taken:
                deliver(calls, given)


Call = HostCall | EachTrip | OneOf


def count(calls: Sequence[Call]) -> int:
    """How many arrays these calls take."""
    return sum(call.arrays for call in calls)


def deliver(calls: Sequence[Call], arrays: Sequence[Any]) -> None:
    """Make the calls in their order."""
    left = iter(arrays)
    for call in calls:
        call.deliver(left)


def sources(calls: Sequence[Call]) -> Iterator[str]:
    """The user's line of every call."""
    for call in calls:
        match call:
            case HostCall():
                yield call.source
            case EachTrip():
                yield from sources(call.calls)
            case OneOf():
                yield from (line for branch in call.branches for line in sources(branch))
