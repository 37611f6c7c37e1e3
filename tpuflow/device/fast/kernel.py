"""One kernel as whole-tensor XLA operations: the lift, with some grid axes turned into loops where it must be.

The same code serves three tiers; they differ only in which grid axes run as loops:
  1 (lift)   none: every tile becomes a virtual tensor over the whole grid, an accumulator a reduction;
  2 (batch)  the sequential axes;
  3 (loop)   all axes, one tile after the other.
A tier that has no whole-tensor form for some instruction raises `CannotLift` and the next one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from tpuflow.device.fast.access import Trips
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.halos import halos_of
from tpuflow.device.fast.lift import handler_of
from tpuflow.device.fast.positions import CannotLift
from tpuflow.device.fast.rerolled import rerolled
from tpuflow.device.fast.shapes import covers, in_shape_of_buffers
from tpuflow.device.fast.virtual import Gather, Lifting, State, Virtual
from tpuflow.errors import ProgramError
from tpuflow.isa.dma import Store
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import Buffer, Kernel

UNROLL_STEPS, UNROLL_INSTRUCTIONS = 16, 4096


def translate_kernel(
    kernel: Kernel,
    buffers: Sequence[Buffer],
    hbm: dict[int, Any],
    ar: LaxArithmetic,
    resting: Set[int] = frozenset(),
    read_later: Set[int] = frozenset(),
    gather: Gather | None = None,
) -> tuple[dict[int, Any], int]:
    """(new content of every buffer the kernel writes, tier used).

    hbm: the arrays of all live buffers, by number. resting: buffers that are at rest at the end of the trip (see `LaxArithmetic`): the
    kernel itself then reads what it writes there in that form. read_later, gather: as of `Lifting`.
    """
    if any(g.size == 0 for g in kernel.grid if g.kind == "parallel"):
        return {}, 1
    kernel = in_shape_of_buffers(kernel, buffers)
    once = rerolled(kernel)
    attempts = ((1, once, ()), (1, kernel, ()), (2, kernel, kernel.sequential), (3, kernel, kernel.parallel + kernel.sequential))
    for tier, form, looped in attempts if once is not kernel else attempts[1:]:
        if tier == 2 and not looped:
            continue
        try:
            translation = _Translation(form, buffers, ar, frozenset(looped), resting, read_later, gather, exact_order=ar.bitexact)
            written = translation.run(dict(hbm))
        except CannotLift as reason:
            if tier == 3:
                raise ProgramError(
                    f"kernel {kernel.name!r}: the fast engine has no form for it, tile by tile included: {reason}."
                ) from None
            continue
        return written, tier
    raise AssertionError("tier 3 takes every verified kernel")


class _Translation(Lifting):
    """The translation of one kernel with a fixed choice of looped axes."""

    def __init__(
        self,
        kernel: Kernel,
        buffers: Sequence[Buffer],
        ar: LaxArithmetic,
        looped: frozenset[int],
        resting: Set[int],
        read_later: Set[int],
        gather: Gather | None,
        *,
        exact_order: bool,
    ):
        super().__init__(kernel, buffers, ar, looped, read_later, gather)
        stores = [i.window for i in kernel.instructions if isinstance(i, Store) and i.window.buffer in resting]
        self.resting = {w.tile for w in stores if covers(kernel, w) and not looped}
        self.carried = frozenset(_carried_tiles(kernel))
        self.leaked = _leaked_tiles(kernel)
        self.steps = LoopNest(kernel.grid).steps
        self.folded = self.steps != 1 and not looped
        if self.folded:
            self._check_foldable()
            if exact_order and self.carried:
                looped = frozenset(kernel.sequential)
                self.folded = False
        self.looped = looped
        halos = halos_of(kernel)
        lifted = any(n != 1 for g, n in enumerate(self.sizes) if g not in looped)
        if halos is None and lifted:
            raise CannotLift("a halo tile is used for something else than a product")
        self.halos = (halos or {}) if lifted else {}
        self.tails = {g: self._has_tail(g) for g in looped}
        copies = max(1, len(kernel.instructions)) << sum(self.tails.values())  # a clipped tail is translated by itself
        self.unrolled = max(1, min(UNROLL_STEPS, UNROLL_INSTRUCTIONS // copies))

    def _check_foldable(self) -> None:
        """Tier 1 over several steps: carried tiles are pure accumulators and nothing but them leaves the body."""
        if self.leaked - self.carried:
            raise CannotLift("the last step's tile is used after the body")
        for tile in self.carried:
            users = [i for i in self.kernel.body if tile in (*i.reads(), *i.writes())]
            if len(users) != 1 or not users[0].has("accumulates"):
                raise CannotLift("a tile carried from step to step is not a plain accumulator")

    def _has_tail(self, g: int) -> bool:
        tiles = {t for i in self.kernel.instructions for t in (*i.reads(), *i.writes())}
        return any(a.grid == g and a.extent % a.size for t in tiles for a in t.axes)

    def run(self, hbm: dict[int, Any]) -> dict[int, Any]:
        """Translate the whole grid; returns the written buffers."""
        written = sorted({w.buffer for i in self.kernel.instructions for role, w in i.windows() if role == "write"})
        state = State(_Arrays(self, hbm))
        axes = tuple(g for g in self.kernel.parallel if g in self.looped)
        self._loop(axes, Trips(self.sizes, {}, {}), state, written, (), self._point)
        state.write_pieces(self.buffers)
        return {b: state.hbm[b] for b in written}

    def _point(self, trips: Trips, state: State) -> None:
        state.tiles = {}
        self._section(self.kernel.prologue, _at_fixed_indices(trips, self.kernel, "prologue"), state)
        axes = tuple(g for g in self.kernel.sequential if g in self.looped)
        written = sorted({w.buffer for i in self.kernel.body for role, w in i.windows() if role == "write"})
        if self.steps or not axes:
            self._loop(axes, trips, state, written, tuple(self.carried | self.leaked), self._step)
        self._section(self.kernel.epilogue, _at_fixed_indices(trips, self.kernel, "epilogue"), state)

    def _step(self, trips: Trips, state: State) -> None:
        self._section(self.kernel.body, trips, state)

    def _section(self, instructions: tuple[Instruction, ...], trips: Trips, state: State) -> None:
        for instruction in instructions:
            handler_of(instruction)(self, instruction, trips, state)
            self._rest(instruction.writes(), state)

    def _rest(self, written: Iterable[Tile], state: State) -> None:
        """Put tiles at rest that are in `resting`."""
        for tile in self.resting.intersection(written):
            rested = self.ar.rest(state.tiles[tile].array, tile.dtype)
            state.tiles[tile] = Virtual(self.ar.load(rested, tile.dtype), state.tiles[tile].batch, rested=rested)

    def _loop(
        self,
        axes: tuple[int, ...],
        trips: Trips,
        state: State,
        written: list[int],
        tiles: tuple[Tile, ...],
        body: Callable[[Trips, State], None],
    ) -> None:
        """Run `body` over the given looped grid axes, outermost first: full tiles in one loop, a clipped tail by itself."""
        if not axes:
            body(trips, state)
            return
        g, rest = axes[0], axes[1:]
        size = self.sizes[g]
        last_apart = self.tails[g] or bool(tiles and self.leaked - self.carried)
        full = size - 1 if last_apart and size else size

        def inner(index: Any, low: int, high: int, current: State) -> None:
            here = replace(trips, index={**trips.index, g: index}, bounds={**trips.bounds, g: (low, high)})
            self._loop(rest, here, current, written, tiles, body)

        if full <= (self.unrolled if len(axes) == 1 else 1):
            for i in range(full):
                inner(i, i, i, state)
        else:
            self._counted(full, state, written, tiles, inner)
        if full < size:
            inner(full, full, full, state)

    def _counted(self, count: int, state: State, written: list[int], tiles: tuple[Tile, ...], inner: Callable[..., None]) -> None:
        """`count` trips as one XLA loop carrying the written buffers and the tiles that live from trip to trip."""
        kept = [t for t in tiles if t in state.tiles]
        batches = [state.tiles[t].batch for t in kept]

        def trip(i: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            arrays, values = carry
            local = State({**state.hbm, **dict(zip(written, arrays, strict=True))}, dict(state.tiles))
            local.tiles.update({t: Virtual(v, b) for t, v, b in zip(kept, values, batches, strict=True)})
            inner(i, 0, count - 1, local)
            if any(local.tiles[t].batch != b for t, b in zip(kept, batches, strict=True)):
                raise CannotLift("an accumulator depends on more lifted axes after a step than before")
            return [local.hbm[b] for b in written], [local.tiles[t].array for t in kept]

        start = ([state.hbm[b] for b in written], [state.tiles[t].array for t in kept])
        arrays, values = lax.fori_loop(0, count, trip, start)
        state.hbm.update(zip(written, arrays, strict=True))
        state.tiles.update({t: Virtual(v, b) for t, v, b in zip(kept, values, batches, strict=True)})


class _Arrays(dict[int, Any]):
    """The arrays of buffers. What a kernel is the first to write begins as zeros, made where the kernel does not write all of it."""

    def __init__(self, translation: _Translation, arrays: Mapping[int, Any]):
        super().__init__(arrays)
        self._translation = translation

    def __missing__(self, number: int) -> Any:
        buffer = self._translation.buffers[number]
        self[number] = jnp.zeros(buffer.shape, self._translation.ar.held_type(buffer.dtype))
        return self[number]


def _carried_tiles(kernel: Kernel) -> set[Tile]:
    """Tiles that the body reads before it writes them."""
    written: set[Tile] = set()
    carried: set[Tile] = set()
    for instruction in kernel.body:
        carried |= {t for t in instruction.reads() if t not in written}
        written |= set(instruction.writes())
    return {t for t in carried if t in written}


def _leaked_tiles(kernel: Kernel) -> set[Tile]:
    """Tiles that the body writes and the epilogue reads before writing."""
    body = {t for i in kernel.body for t in i.writes()}
    written: set[Tile] = set()
    leaked: set[Tile] = set()
    for instruction in kernel.epilogue:
        leaked |= {t for t in instruction.reads() if t not in written} & body
        written |= set(instruction.writes())
    return leaked


def _at_fixed_indices(trips: Trips, kernel: Kernel, section: str) -> Trips:
    """The trips of a section, with the sequential axes at its fixed indices, whether they are looped or lifted."""
    at = LoopNest(kernel.grid).fixed_indices(section)
    return replace(trips, index={**trips.index, **at}, bounds={**trips.bounds, **{g: (i, i) for g, i in at.items()}})
