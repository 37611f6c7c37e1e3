"""Addresses: a linear scan over lifetimes with a best-fit free list."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Request:
    """So many bytes, from one tick to another, both included."""

    bytes: int
    start: int
    end: int


def aligned(count_bytes: int) -> int:
    """Bytes rounded up to the alignment."""
    return -(-count_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def assign(requests: Sequence[Request]) -> tuple[list[int], int]:
    """An address for each request, such that no two that meet in time overlap, and the end of the highest."""
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
