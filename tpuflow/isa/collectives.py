"""Several chips: the axes of a mesh, the chip's position on them, and collectives, which the link queue carries out while kernels run.

The same Program runs on every chip of its mesh. Chips are numbered row-major over the axes, the last one fastest. A collective runs in
groups of chips: those that differ only along its `axes`, numbered row-major over these. Every member sends its `source`; what it finds in
its `target` after the wait is the collective's meaning, a function of all members' arrays as dense rows of elements.

A sum (or maximum, or minimum) is reduced around a ring: the source is divided into as many parts as the axis has chips (of equal length,
the last ones shorter or empty if they do not divide). The reduction of part c starts with chip c + 1's data, to which chips c + 2, c + 3,
..., and last chip c add theirs, each time rounded once to the array's own type. A sum over several axes is the sum over the first axis,
then the sum of these sums over the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tpuflow.dtypes import DType

if TYPE_CHECKING:
    from tpuflow.isa.arithmetic import Arithmetic

REDUCERS = {"none": 0, "add": 1, "max": 2, "min": 3}
"""How a collective combines the data of several chips -> its number in the binary; "none" combines nothing."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh: a row of `size` chips (a ring, if the chip has the links for it).

    joined: this axis and the one before it are sub-axes of one row, so that a group of chips along either is a part of the row. It matters
    for the time of collectives alone.
    """

    name: str
    size: int
    joined: bool = False


Cut = tuple[tuple[int, ...], ...]
"""A sharding: for each dimension of an array, the mesh axes (by number, major first) over which it is divided; none: it is replicated."""


@dataclass(frozen=True, slots=True)
class Position:
    """Write the chip's position along mesh axis `axis` to the s32 scalar in `buffer`."""

    axis: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Collective:
    """Start to send buffer `source` over the mesh axes `axes`, and to receive into `target`, until the wait for `semaphore`.

    `kind` says what is received (see the kinds), `reducer` how the data of several chips are combined. `pairs` are those of a permute:
    (sender, receiver) within the group. Until the wait the source must not be written, and the target neither read nor written.
    """

    kind: str
    reducer: str
    axes: tuple[int, ...]
    source: int
    target: int
    semaphore: int
    pairs: tuple[tuple[int, int], ...] = ()
    scope: str = field(default="", compare=False)
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until the collective or copy that was started on `semaphore` has received all of its target and sent all of its source."""

    semaphore: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of collective.

    received_elems: (elements of the source, chips of the group) -> elements of the target, None if the source does not divide. sent_elems:
    the same arguments -> elements that a chip sends over its links. alike: all members receive the same data. meaning: (collective,
    arithmetic, sent [chips, elems], sizes of the axes, dtype) -> received, [elems] if `alike`, else [chips, elems]; both are the
    arithmetic's values of `dtype`.
    """

    code: int
    says: str
    reduces: bool
    alike: bool
    received_elems: Callable[[int, int], int | None]
    sent_elems: Callable[[int, int], int]
    meaning: Callable[[Collective, Arithmetic, Any, Sequence[int], DType], Any]


def _same(elems: int, chips: int) -> int | None:
    return elems


def _share(elems: int, chips: int) -> int | None:
    return None if elems % chips else elems // chips


def _times(elems: int, chips: int) -> int | None:
    return elems * chips


def _part_elems(elems: int, chips: int) -> int:
    return -(-elems // chips)


def _ring_sum(c: Collective, ar: Arithmetic, sent: Any, sizes: Sequence[int], dtype: DType) -> Any:
    """The sum of all chips' rows, around the rings of one axis after the other."""
    chips, elems = sent.shape
    part = _part_elems(elems, chips)
    if missing := chips * part - elems:
        sent = ar.concatenate((sent, ar.full((chips, missing), 0, dtype)), 1)
    value = sent.reshape(*sizes, *sizes, part)  # [chips of every axis..., parts along every axis..., elements]
    for size in sizes:
        value = _around(ar, c.reducer, value, len(sizes), size, dtype)
    return value.reshape(-1)[:elems]


def _around(ar: Arithmetic, reducer: str, value: Any, part_axis: int, size: int, dtype: DType) -> Any:
    """The first axis, of chips, reduced: for part c along `part_axis` in the order of chips c + 1, c + 2, ..., c."""
    others = [i for i in range(1, value.ndim) if i != part_axis]
    shape = tuple(value.shape[i] for i in others)
    table = ar.transpose(value, (0, part_axis, *others)).reshape(size * size, *shape)  # [chip x part, ...]
    twice = ar.broadcast(table, (2, *table.shape), range(1, table.ndim + 1)).reshape(2 * size * size, *shape)
    total = None
    for hop in range(1, size + 1):
        term = twice[hop * size : hop * size + size * size : size + 1]  # [part, ...]: of part c what chip c + hop has
        total = term if total is None else ar.binary(reducer, total, term, dtype)
    back = list(range(1, len(others) + 1))
    back.insert(part_axis - 1, 0)
    return ar.transpose(total, back)


def _gathered(c: Collective, ar: Arithmetic, sent: Any, sizes: Sequence[int], dtype: DType) -> Any:
    return sent.reshape(-1)


def _scattered(c: Collective, ar: Arithmetic, sent: Any, sizes: Sequence[int], dtype: DType) -> Any:
    return _ring_sum(c, ar, sent, sizes, dtype).reshape(sent.shape[0], -1)


def _exchanged(c: Collective, ar: Arithmetic, sent: Any, sizes: Sequence[int], dtype: DType) -> Any:
    chips, elems = sent.shape
    return ar.transpose(sent.reshape(chips, chips, elems // chips), (1, 0, 2)).reshape(chips, elems)


def _permuted(c: Collective, ar: Arithmetic, sent: Any, sizes: Sequence[int], dtype: DType) -> Any:
    chips, elems = sent.shape
    sender = {receiver: s for s, receiver in c.pairs}
    nothing = ar.full((1, elems), 0, dtype)
    return ar.concatenate([sent[sender[i] : sender[i] + 1] if i in sender else nothing for i in range(chips)], 0)


KINDS: Mapping[str, Kind] = {
    "all_reduce": Kind(
        0, "the sum of what all members send", True, True,
        _same, lambda elems, chips: 2 * (chips - 1) * _part_elems(elems, chips), _ring_sum,
    ),
    "reduce_scatter": Kind(
        1, "member i: part i of the sum of what all members send", True, False,
        _share, lambda elems, chips: (chips - 1) * _part_elems(elems, chips), _scattered,
    ),
    "all_gather": Kind(
        2, "what all members send, one after the other", False, True,
        _times, lambda elems, chips: (chips - 1) * elems, _gathered,
    ),
    "all_to_all": Kind(
        3, "member i: part i of what each member sends, one after the other", False, False,
        lambda elems, chips: None if elems % chips else elems, lambda elems, chips: (chips - 1) * _part_elems(elems, chips), _exchanged,
    ),
    "permute": Kind(
        4, "what the one of `pairs` that sends to this member sends; zeros if there is none", False, False,
        _same, lambda elems, chips: elems, _permuted,
    ),
}  # fmt: skip
KIND_CODES = {name: kind.code for name, kind in KINDS.items()}


def farthest(pairs: Sequence[tuple[int, int]], chips: int) -> int:
    """The most hops that a message of any of the pairs takes around a ring of `chips` chips."""
    return max((min((r - s) % chips, (s - r) % chips) for s, r in pairs), default=0)


def chips_of(mesh: Sequence[MeshAxis]) -> int:
    """How many chips a mesh has (1 if it has no axes)."""
    return math.prod(axis.size for axis in mesh)


def sizes_of(mesh: Sequence[MeshAxis], axes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of some axes of a mesh."""
    return tuple(mesh[a].size for a in axes)


def groups(mesh: Sequence[MeshAxis], axes: Sequence[int]) -> np.ndarray:
    """Numbers of the chips that take part in a collective over `axes` together: [groups, members], members in their order."""
    chips = np.arange(chips_of(mesh)).reshape([axis.size for axis in mesh])
    others = [a for a in range(len(mesh)) if a not in axes]
    return chips.transpose(*others, *axes).reshape(-1, math.prod(sizes_of(mesh, axes)))


def position(mesh: Sequence[MeshAxis], chip: int, axis: int) -> int:
    """The index of a chip along a mesh axis."""
    return chip // math.prod(a.size for a in mesh[axis + 1 :]) % mesh[axis].size


def whole_shape(shape: Sequence[int], cut: Cut, mesh: Sequence[MeshAxis]) -> tuple[int, ...]:
    """The shape of the whole array of which every chip has a shard of `shape`."""
    return tuple(n * math.prod(sizes_of(mesh, axes)) for n, axes in zip(shape, cut or ((),) * len(shape), strict=True))


def where_text(block: object) -> str:
    """For the end of a message: the source line of a collective, if it is known."""
    return f" ({block.where})" if isinstance(block, Collective) and block.where else ""
