"""Calls of the host's Python from a program.

Of a Program that only tells the host something (`jax.debug.print`, `jax.debug.callback`, `io_callback` without results) the first outfeed
ports carry the calls' arrays, in the order of the calls; one item of each port is what one run of the step sends, and the calls are made
after it (`HostCall`). A Program that needs what the host answers (`pure_callback`, `io_callback` with results) calls it where the call
stands, by a block, and waits (`HostFunction`): all of its calls are of this kind, so that they are made in its order.

Python functions have no place in a file: a Program with calls runs where it was compiled and cannot be saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tpuflow.dtypes import DType
from tpuflow.errors import LaunchError

HOST_CALL = "tpuflow_host_call"
"""In a module of StableHLO, the target of a custom call with side effects of the host function numbered in its `backend_config` (a
string)."""

ArrayType = tuple[DType, tuple[int, ...]]
"""Element type and shape."""


@dataclass(frozen=True, slots=True, eq=False)
class HostFunction:
    """What a program asks the host at one place: `function(*arrays)` -> arrays, of these types, written at the user's line `source`."""

    function: Callable[..., Any]
    source: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]

    @property
    def bytes(self) -> int:
        """What crosses the host's link, both ways."""
        return sum(dtype.bytes * math.prod(shape) for dtype, shape in (*self.operands, *self.results))

    def answer(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the host makes of the operands' elements, in any shape.

        Raises:
          LaunchError: the function returns other arrays than it is declared to.
        """
        given = [x.reshape(shape) for x, (_, shape) in zip(arrays, self.operands, strict=True)]
        found = self.function(*given)
        made = [] if found is None else [np.asarray(x) for x in found]
        types = [(canonical_type(x.dtype), x.shape) for x in made]
        expected = [(dtype.numpy, shape) for dtype, shape in self.results]
        if types != expected:
            raise LaunchError(
                f"{self.source}: the host's function returned {_listed(types)}; expected {_listed(expected)}, as the program declares it. "
                "Return arrays of these types and shapes, or declare those that it returns."
            )
        return [x.astype(dtype.numpy, copy=False) for x, (dtype, _) in zip(made, self.results, strict=True)]

    def __str__(self) -> str:
        return self.source


def canonical_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Python's numbers have 64 bits; arrays of the device 32, as JAX's do by default."""
    return _NARROW.get(dtype, dtype)


_NARROW = {np.dtype(f"{kind}8"): np.dtype(f"{kind}4") for kind in "iuf"}


def _listed(types: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> str:
    return f"({', '.join(f'{dtype}{list(shape)}' for dtype, shape in types)})"


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
