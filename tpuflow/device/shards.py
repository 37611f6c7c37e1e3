"""Arrays of the host cut into the chips' own, and put together again."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from tpuflow.isa.collectives import Cut, MeshAxis


def apart(array: Any, cut: Cut, mesh: Sequence[MeshAxis], axes: Set[int], lead: int = 0) -> Any:
    """The pieces of an array [lead axes..., whole...] that is cut as `cut` says: [mesh axes `axes`..., lead axes..., piece...].

    Mesh axes come in their order; along those that the array is not cut over, all pieces are the same.
    """
    rank = array.ndim - lead
    rows = cut or ((),) * rank
    dims, where, own = list(array.shape[:lead]), dict[int, int](), list(range(lead))
    for length, over in zip(array.shape[lead:], rows, strict=True):
        for a in over:
            where[a] = len(dims)
            dims.append(mesh[a].size)
            length //= mesh[a].size
        own.append(len(dims))
        dims.append(length)
    named = sorted(where)
    if named:
        array = array.reshape(dims).transpose([*(where[a] for a in named), *own])
    missing = sorted(axes - where.keys())
    for a in missing:
        at = sum(b < a for b in (*named, *(m for m in missing if m < a)))
        array = _repeated(array, at, mesh[a].size)
    return array


def together(pieces: Any, cut: Cut, mesh: Sequence[MeshAxis], axes: Set[int], lead: int = 0) -> Any:
    """The array [lead axes..., whole...] of pieces [mesh axes `axes`..., lead axes..., piece...]; see `apart`.

    Along axes that the array is not cut over, the first piece is taken.
    """
    rows = cut or ((),) * (pieces.ndim - len(axes) - lead)
    named = {a for over in rows for a in over}
    present = sorted(axes)
    pieces = pieces[tuple(slice(None) if a in named else 0 for a in present)]
    present = [a for a in present if a in named]
    for a in sorted(named - axes):
        at = sum(b < a for b in present)
        pieces = _repeated(pieces, at, mesh[a].size)
        present.insert(at, a)
    if not present:
        return pieces
    count = len(present)
    order, shape = [count + i for i in range(lead)], list(pieces.shape[count : count + lead])
    for d, over in enumerate(rows):
        order += [*(present.index(a) for a in over), count + lead + d]
        length = pieces.shape[count + lead + d]
        for a in over:
            length *= mesh[a].size
        shape.append(length)
    return pieces.transpose(order).reshape(shape)


def _repeated(array: Any, at: int, times: int) -> Any:
    """A new axis, along which the array is the same."""
    grown = array[(*(slice(None),) * at, None)]
    if isinstance(array, np.ndarray):
        return np.broadcast_to(grown, (*array.shape[:at], times, *array.shape[at:]))
    return grown.repeat(times, at)
