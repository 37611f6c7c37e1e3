"""Addresses: a linear scan over lifetimes with a best-fit free list, or, where that leaves gaps, the largest first."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

ALIGNMENT_BYTES = 256
WORTH_PACKING = 1.005  # more than this times the peak of live bytes is fragmentation that is worth a second strategy


@dataclass(frozen=True, slots=True)
class Request:
    """A buffer to place: its bytes, and the first and last tick at which it is live, both included."""

    bytes: int
    start: int
    end: int


def aligned(count_bytes: int) -> int:
    """Bytes rounded up to the alignment."""
    return -(-count_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def assign(requests: Sequence[Request]) -> tuple[list[int], int]:
    """(an address for each request, the highest end), such that requests that are live at one time do not overlap.

    Placed in order of time; where that is fragmented, in order of size if that is better.
    """
    in_time = _in_time(requests)
    if in_time[1] <= WORTH_PACKING * _most(requests):
        return in_time
    return min(in_time, _by_size(requests), key=lambda found: found[1])


def _most(requests: Sequence[Request]) -> int:
    """The peak of live bytes."""
    change: Counter[int] = Counter()
    for r in requests:
        change[r.start] += aligned(r.bytes)
        change[r.end + 1] -= aligned(r.bytes)
    return max(itertools.accumulate(change[t] for t in sorted(change)), default=0)


def _by_size(requests: Sequence[Request]) -> tuple[list[int], int]:
    """Place the largest first, each in the lowest gap between those already placed that are live at the same time."""
    order = sorted(range(len(requests)), key=lambda i: (-requests[i].bytes, requests[i].start, i))
    placed = np.zeros((4, len(requests)), np.int64)  # start, end, address, end of its bytes: of those placed so far
    addresses = [0] * len(requests)
    for count, i in enumerate(order):
        request, size = requests[i], aligned(requests[i].bytes)
        start, end, low, high = placed[:, :count]
        meet = np.flatnonzero((start <= request.end) & (request.start <= end) & (high > low))
        meet = meet[np.argsort(low[meet], kind="stable")]
        below = np.maximum.accumulate(np.concatenate(([0], high[meet])))  # where a gap begins, before each and after the last
        gaps = np.append(low[meet], np.iinfo(np.int64).max) - below
        addresses[i] = int(below[np.argmax(gaps >= size)])
        placed[:, count] = request.start, request.end, addresses[i], addresses[i] + size
    return addresses, int(placed[3].max(initial=0))


def _in_time(requests: Sequence[Request]) -> tuple[list[int], int]:
    """Linear scan: at its first tick, each is placed in the smallest free block that fits (best fit)."""
    memory = _Memory()
    addresses = [0] * len(requests)
    running: list[tuple[int, int, int]] = []
    for i in sorted(range(len(requests)), key=lambda i: (requests[i].start, i)):
        request = requests[i]
        while running and running[0][0] < request.start:
            _, address, size = heappop(running)
            memory.release(address, size)
        size = aligned(request.bytes)
        addresses[i] = memory.take(size)
        heappush(running, (request.end, addresses[i], size))
    return addresses, memory.top


class _Memory:
    """Free blocks below `top`, by address; neighbours merge."""

    def __init__(self) -> None:
        self.top = 0
        self.free: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """The smallest free block that is large enough, else new memory at the top (with the free block below it, if there is one)."""
        if size == 0:
            return 0
        fits = [(length, address) for address, length in self.free if length >= size]
        if fits:
            length, address = min(fits)
            self.free.remove((address, length))
            if length > size:
                insort(self.free, (address + size, length - size))
            return address
        address = self.top
        if self.free and sum(self.free[-1]) == self.top:
            address, _ = self.free.pop()
        self.top = address + size
        return address

    def release(self, address: int, size: int) -> None:
        """Give a block back."""
        if size == 0:
            return
        at = bisect_left(self.free, (address, size))
        if at < len(self.free) and self.free[at][0] == address + size:
            size += self.free.pop(at)[1]
        if at > 0 and sum(self.free[at - 1]) == address:
            address, below = self.free.pop(at - 1)
            size += below
        insort(self.free, (address, size))
