"""Several stores of one kernel into one buffer, coalesced before they are written: concatenated, or interleaved by their strides.

Written by itself, a piece with strides would be a scatter, which XLA:CPU does element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any

from jax import lax

from tpuflow.device.fast.boxes import spacing
from tpuflow.device.fast.positions import Positions


@dataclass(frozen=True, slots=True)
class Piece:
    """An array of which element i along axis a lies at starts[a] + steps[a] * i of a view (perhaps outside it)."""

    array: Any
    starts: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def positions(self) -> list[Positions]:
        """Where it lies, axis by axis."""
        rows = zip(self.starts, self.steps, self.array.shape, strict=True)
        return [Positions.even(*row) for row in rows]

    def beside(self, axis: int) -> tuple[Any, ...]:
        """A key that is equal for pieces whose places differ along `axis` alone."""
        rows = zip(self.starts, self.steps, self.array.shape, strict=True)
        return tuple((i, *row) for i, row in enumerate(rows) if i != axis)


def piece_at(array: Any, wheres: Sequence[Positions]) -> Piece | None:
    """The piece that stores an array; None if its positions are not static, or not evenly spaced in ascending order."""
    starts, steps = [], []
    for where in wheres:
        step = spacing(where)
        if step < 1:
            return None
        starts.append(where.start + where.offset)
        steps.append(step)
    return Piece(array, tuple(starts), tuple(steps))


def coalesced(pieces: Sequence[Piece]) -> list[Piece]:
    """The same content in fewer pieces, where pieces are adjacent or interleaved."""
    if (whole := _interleaved(pieces)) is not None:
        return [whole]
    found = list(pieces)
    for axis in reversed(range(len(found[0].starts))):
        groups: dict[Any, list[Piece]] = {}
        for piece in found:
            groups.setdefault(piece.beside(axis), []).append(piece)
        found = [made for group in groups.values() for made in _joined(sorted(group, key=lambda p: p.starts[axis]), axis)]
    return found


def _joined(group: list[Piece], axis: int) -> list[Piece]:
    first = group[0]
    step, lengths = first.steps[axis], [p.array.shape[axis] for p in group]
    if len(group) == 1 or any(p.steps[axis] != step for p in group):
        return group
    gaps = [b.starts[axis] - a.starts[axis] for a, b in pairwise(group)]
    if step == 1 and gaps == lengths[:-1]:
        return [replace(first, array=lax.concatenate([p.array for p in group], axis))]
    return group


def _interleaved(pieces: Sequence[Piece]) -> Piece | None:
    """The single piece that all pieces make up if they have one shape and are interleaved, one for each phase of the steps; else None."""
    first, base = pieces[0], tuple(min(starts) for starts in zip(*(p.starts for p in pieces), strict=True))
    by_phase = {tuple(s - b for s, b in zip(p.starts, base, strict=True)): p for p in pieces}
    alike = all(p.steps == first.steps and p.array.shape == first.array.shape for p in pieces)
    if len(pieces) == 1 or not alike or len(pieces) != prod(first.steps) or set(by_phase) != set(product(*map(range, first.steps))):
        return None
    return Piece(_interleave(by_phase, first.steps), base, (1,) * len(base))


def _interleave(by_phase: Mapping[tuple[int, ...], Piece], steps: Sequence[int]) -> Any:
    """Concatenate the pieces along a new axis after each axis with a step, then merge these axes in a single reshape."""
    moving = [axis for axis, step in enumerate(steps) if step > 1]
    places = [axis + 1 + i for i, axis in enumerate(moving)]
    parts = {phase: lax.expand_dims(p.array, places) for phase, p in by_phase.items()}
    for axis, place in zip(reversed(moving), reversed(places), strict=True):
        rows: dict[tuple[int, ...], list[Any]] = {}
        for phase in sorted(parts):
            rows.setdefault((*phase[:axis], 0, *phase[axis + 1 :]), []).append(parts[phase])
        parts = {phase: lax.concatenate(row, place) for phase, row in rows.items()}
    (interleaved,) = parts.values()
    shape = next(iter(by_phase.values())).array.shape
    return interleaved.reshape([n * step for n, step in zip(shape, steps, strict=True)])
