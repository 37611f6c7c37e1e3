"""Host arrays sharded over the chips of a mesh, and unsharded again; both engines do so at a Program's ports."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from tpuflow.isa.collectives import Cut, MeshAxis


def shard(array: Any, cut: Cut, mesh: Sequence[MeshAxis], axes: Set[int], lead: int = 0) -> Any:
    """An array [lead axes..., whole...] -> its shards [mesh axes `axes`..., lead axes..., shard...], as `cut` divides it over `mesh`.

    axes: mesh axes by number, in ascending order in the result; it is replicated along those that `cut` does not name. lead: the number of
    leading axes that `cut` is not about, such as the items of an infeed.
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


def unshard(pieces: Any, cut: Cut, mesh: Sequence[MeshAxis], axes: Set[int], lead: int = 0) -> Any:
    """The inverse of `shard`; of shards along an axis over which the array is replicated, the first is taken.

    `axes` may lack axes that `cut` names: the array is then the same along them, and is repeated.
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
    """The array with a new axis at `at`, along which it is repeated."""
    grown = array[(*(slice(None),) * at, None)]
    if isinstance(array, np.ndarray):
        return np.broadcast_to(grown, (*array.shape[:at], times, *array.shape[at:]))
    return grown.repeat(times, at)
