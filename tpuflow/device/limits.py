"""The limits of a launch, on its work and on host memory, which both engines check before it starts."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip
from tpuflow.device.host_memory import total_bytes
from tpuflow.errors import ConfigError, LimitError
from tpuflow.isa.instruction import Tile, TileAxis, WindowAxis
from tpuflow.isa.occupancy import slot_bytes
from tpuflow.isa.program import BUFFER_SPACES, Kernel, Port, Program

MOST_WORK = 2**44


@dataclass(frozen=True, slots=True)
class Limits:
    """What a launch may take of the host.

    work: tile instructions executed, each block (a kernel, a trip of a loop) counted as one more. 2^44 of them take the fast engine days,
    the reference engine years; a training step has 10^4 to 10^8.
    memory_bytes: bytes of host memory that the Program's own data take, as `host_bytes` counts them; None: all that the host has.
    """

    work: int = MOST_WORK
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("work", self.work), ("memory_bytes", self.memory_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}; expected a positive integer.")

    def check_work(self, found: int) -> None:
        """Refuse a launch of more work, known before it starts.

        Raises:
          LimitError: with both numbers.
        """
        if found > self.work:
            raise LimitError(f"the launch takes {_count(found)} tile instructions; {_limit('work', self.work, '--max-work')}.")

    def exceeded(self) -> LimitError:
        """The error of a launch that was stopped as it ran."""
        return LimitError(
            f"the launch was stopped after more than {self.work} tile instructions; {_limit('work', self.work, '--max-work')}."
        )

    def check_memory(self, found: int) -> None:
        """Refuse a launch that takes more memory.

        Raises:
          LimitError: with both numbers.
        """
        limit = total_bytes() if self.memory_bytes is None else self.memory_bytes
        if found > limit:
            whose = " (the host's memory)" if self.memory_bytes is None else ""
            raise LimitError(
                f"the launch takes {found} bytes of host memory; {_limit('memory_bytes', limit, '--max-memory')}{whose}, or compile for "
                "smaller arrays."
            )


def _count(n: int) -> str:
    return str(n) if n < 10**18 else f"about 10^{math.log10(n):.0f}"


def _limit(name: str, value: int, option: str) -> str:
    return f"the limit is {value}: raise it with Limits({name}=...), on the command line {option}"


def host_bytes(program: Program) -> int:
    """Bytes of host memory that the data of a Program take, apart from infeed and outfeed items.

    That is its buffers, its constants, and for the kernel that takes most the largest of: its on-chip memory, the array of one of its tiles
    over the whole grid (a virtual tensor of the fast engine), and a buffer with the padding that its loads reach into. The engines take a
    multiple of some of it: the reference engine records the owner of every byte, the fast engine has old and new contents at once.
    """
    constants = sum(len(c.data) for c in program.constants)
    return occupied_bytes(program) + constants + max((_kernel_bytes(k, program.chip) for k in program.distinct_kernels()), default=0)


def items_bytes(ports: Sequence[Port], items: int) -> int:
    """Bytes of so many items of every port."""
    return items * sum(_port_bytes(p) for p in ports)


def _port_bytes(port: Port) -> int:
    size = port.dtype.bytes
    for n in port.shape:
        size *= n
    return size


def occupied_bytes(program: Program, spaces: Collection[str] = BUFFER_SPACES) -> int:
    """Bytes of these memories that some buffer occupies."""
    total = end = 0
    for low, high in sorted(b.span for b in program.buffers if b.bytes and b.space in spaces):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def _kernel_bytes(kernel: Kernel, chip: Chip) -> int:
    tiles = {t for i in kernel.instructions for t in (*i.reads(), *i.writes())}
    ends: dict[str, int] = {}
    for t in tiles:
        ends[t.space] = max(ends.get(t.space, 0), t.address + t.slots * slot_bytes(t, chip))
    moving = _moving(kernel)
    whole = (_whole_bytes(t, kernel, moving.get(t, frozenset())) for t in tiles)
    return max(sum(ends.values()), max(whole, default=0), max(_padded_bytes(kernel), default=0))


def _padded_bytes(kernel: Kernel) -> Iterator[int]:
    """Buffers as their loads see them, with room for all that these read outside of them."""
    loads = {id(w): w for i in kernel.instructions for role, w in i.windows() if role == "read"}.values()
    spans: dict[Hashable, list[tuple[int, int]]] = {}
    for w in loads:
        reach = [_reach(axis, tile, kernel) for axis, tile in zip(w.axes, w.tile.axes, strict=True)]
        key = w.buffer, w.tile.dtype.bytes, tuple((a.extent, a.pitch, a.dilation) for a in w.axes)
        known = spans.setdefault(key, reach)
        spans[key] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, reach, strict=True)]
    for (_, size, _), reach in spans.items():  # type: ignore[misc]
        yield math.prod(high - low for low, high in reach) * size


def _reach(axis: WindowAxis, tile: TileAxis, kernel: Kernel) -> tuple[int, int]:
    """The first position of a view axis and of a window along it over the grid, and one past the last."""
    moves = [e * max(0, kernel.grid[g].size - 1) for g, e in axis.grid] + [axis.step * max(0, tile.size - 1)]
    low, high = (axis.origin + sum(end(0, m) for m in moves) for end in (min, max))
    return min(0, low), max(axis.extent * axis.dilation, high + 1)


def _moving(kernel: Kernel) -> dict[Tile, frozenset[int]]:
    """The grid axes that the content of each tile depends on, except those that block one of its own axes."""
    found: dict[Tile, frozenset[int]] = {}
    for i in kernel.instructions:
        axes = frozenset(g for _, w in i.windows() for a in w.axes for g, elements in a.grid if elements)
        axes = axes.union(*(found.get(t, frozenset()) for t in i.reads()))
        for t in i.writes() if axes else ():
            found[t] = found.get(t, frozenset()) | (axes - {a.grid for a in t.axes})
    return found


def _whole_bytes(tile: Tile, kernel: Kernel, moving: frozenset[int]) -> int:
    """A tile over the whole grid as one array."""
    return math.prod(tile.whole_shape) * math.prod(kernel.grid[g].size for g in moving) * tile.dtype.bytes
