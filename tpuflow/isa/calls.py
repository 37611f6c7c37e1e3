"""Calls of Python functions on the host from a Program.

If no call has results (`jax.debug.print`, `jax.debug.callback`, `io_callback` without results), the first outfeed ports carry the calls'
arguments, in the order of the calls: every run of the step sends one item to each port, and the host makes the calls after it (`HostCall`).
If any call has results (`pure_callback`, `io_callback` with results), or the Program is for several chips, all calls are `CallHost` blocks,
at which the device waits for the host (`HostFunction`): so calls of both kinds are made in program order.

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

HOST_CALL, HOST_CALL_PER_CHIP = "tpuflow_host_call", "tpuflow_host_call_per_chip"
"""The targets of the StableHLO custom calls of a host function with side effects, whose number is its `backend_config` (a string). On
several chips the first is made once, the second by every chip."""
HOST_CALLS = (HOST_CALL, HOST_CALL_PER_CHIP)

ArrayType = tuple[DType, tuple[int, ...]]
"""Element type and shape."""


@dataclass(frozen=True, slots=True, eq=False)
class HostFunction:
    """A host function that a `CallHost` block calls: `function(*arrays)` -> arrays, of these types; `source` is the user's line.

    On several chips it is called once, with the arrays of the first, and every chip gets what it returns; `per_chip`: for each chip with
    its own arrays, for its own results."""

    function: Callable[..., Any]
    source: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    per_chip: bool = False

    @property
    def bytes(self) -> int:
        """Bytes over the link to the host, both ways."""
        return sum(dtype.bytes * math.prod(shape) for dtype, shape in (*self.operands, *self.results))

    def answer(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Call the function with `arrays`, which have the operands' elements in any shape; its results, in the declared types.

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
    """A 64-bit type, as of Python's numbers, as the device's type of 32 bits (JAX's default, too); others as they are."""
    return _NARROW.get(dtype, dtype)


_NARROW = {np.dtype(f"{kind}8"): np.dtype(f"{kind}4") for kind in "iuf"}


def _listed(types: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> str:
    return f"({', '.join(f'{dtype}{list(shape)}' for dtype, shape in types)})"


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call without results: `function(*arrays)` with `operands` arrays; `source` is the user's line."""

    function: Callable[..., Any]
    operands: int
    source: str

    @property
    def arrays(self) -> int:
        """The number of arrays sent for it: at least one, since the host counts runs of the step by them."""
        return max(1, self.operands)

    def deliver(self, arrays: Iterator[Any]) -> None:
        """Call it with the next arrays."""
        self.function(*list(islice(arrays, self.arrays))[: self.operands])


@dataclass(frozen=True, slots=True)
class EachTrip:
    """The calls of every trip of a counted loop. Their arrays are stacked, [trips, ...]; the last trip comes first if `reverse`."""

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
    """The calls of the taken branch. The first array is its index (clamped); the others are the arrays of all branches."""

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
