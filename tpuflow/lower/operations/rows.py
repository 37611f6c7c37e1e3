"""Slices of an array as rows of a matrix, to which gather and scatter are both reduced.

The operand is seen as [N, C]: its indexed axes, and those of which only a part is taken, count the N rows; the axes taken whole make up
the C columns. Each slice becomes as many rows as it has positions along the partly taken axes. A row number out of range marks a slice
that lies outside: such rows give the fill value, or are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.elementwise import as_index

Axes = Sequence[int]


@dataclass(frozen=True, slots=True)
class SliceAxes:
    """Which axes of a gather or scatter are what, as StableHLO's dimension numbers say it. Index components lie along a last axis.

    window: the axes of the result, or of the updates, that run through a slice. collapsed: the operand's axes, of size 1 in a slice, that
    they do not have. indexed: the operand axis of each index component. operand_batching, indices_batching: axes that run together.
    """

    window: tuple[int, ...]
    collapsed: tuple[int, ...]
    indexed: tuple[int, ...]
    operand_batching: tuple[int, ...] = ()
    indices_batching: tuple[int, ...] = ()

    @property
    def removed(self) -> tuple[int, ...]:
        """The operand's axes that a slice in the result, or in the updates, does not have."""
        return self.collapsed + self.operand_batching

    @property
    def batching(self) -> tuple[tuple[int, int], ...]:
        """Operand axes with the index axes they run along."""
        return tuple(zip(self.operand_batching, self.indices_batching, strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """How slices of an operand become rows of a matrix.

    `sizes`: the slice along each operand axis (1 where it is collapsed). `indexed`: the operand axis of each index component.
    `batching`: pairs (operand axis, axis of the index array) that run together. `batch`: shape of the index array without components.
    """

    operand: TensorType
    sizes: tuple[int, ...]
    indexed: tuple[int, ...]
    batching: tuple[tuple[int, int], ...]
    batch: tuple[int, ...]

    @property
    def row_axes(self) -> tuple[int, ...]:
        """Operand axes that count rows."""
        paired = {axis for axis, _ in self.batching}
        return tuple(i for i, n in enumerate(self.operand.shape) if i in paired or self.sizes[i] != n)

    @property
    def column_axes(self) -> tuple[int, ...]:
        """Operand axes taken whole."""
        return tuple(i for i in range(len(self.operand.shape)) if i not in self.row_axes)

    @property
    def part_axes(self) -> tuple[int, ...]:
        """Row axes of which a slice takes several positions."""
        return tuple(i for i in self.row_axes if self.sizes[i] != 1)

    @property
    def matrix(self) -> tuple[int, int]:
        """[N, C]."""
        shape = self.operand.shape
        return math.prod(shape[i] for i in self.row_axes), math.prod(shape[i] for i in self.column_axes)

    @property
    def permutation(self) -> tuple[int, ...]:
        """Row axes before column axes."""
        return self.row_axes + self.column_axes

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The rows of all slices: [batch..., parts...]."""
        return self.batch + tuple(self.sizes[i] for i in self.part_axes)

    @property
    def one_slice(self) -> bool:
        """Whether the gather or scatter has a single slice."""
        return math.prod(self.batch) == 1 and not self.batching

    @property
    def one_hot_axis(self) -> int | None:
        """The axis along which every batch element accesses one element, as in `take_along_axis` at labels; None for other accesses.

        Such a gather or scatter is done with a one-hot mask and needs no indexed load or store.
        """
        paired = {axis for axis, _ in self.batching}
        alone = set(self.row_axes) == {*paired, *self.indexed} and len(self.indexed) == 1
        elements = math.prod(self.operand.shape[i] for i in paired)
        if not alone or self.part_axes or self.matrix[1] != 1 or elements != math.prod(self.batch):
            return None
        return self.indexed[0]

    @property
    def slice_axes(self) -> tuple[int, ...]:
        """The operand's axes in the order in which they make up a slice's elements [parts..., columns...]."""
        return self.part_axes + self.column_axes


def _component(b: Builder, indices: Value, i: int) -> Value:
    """[batch..., components] -> [batch...], s32."""
    axis = len(indices.shape) - 1
    return as_index(b, b.reshape(b.slice_axis(indices, axis, i, i + 1), indices.shape[:-1]))


def starts(b: Builder, plan: Plan, indices: Value, *, clip: bool) -> tuple[dict[int, Value], Value | None]:
    """The start of every slice along each indexed axis, clamped to be in range; and which slices were in range before (None: all)."""
    found: dict[int, Value] = {}
    inside: Value | None = None
    for i, axis in enumerate(plan.indexed):
        raw, last = _component(b, indices, i), plan.operand.shape[axis] - plan.sizes[axis]
        found[axis] = b.min(b.max(raw, 0), max(last, 0))
        if not clip:
            here = b.and_(b.ge(raw, 0), b.le(raw, last))
            inside = here if inside is None else b.and_(inside, here)
    return found, inside


def rows(b: Builder, plan: Plan, indices: Value, *, clip: bool) -> Value:
    """Row number of every row of every slice, s32[R]; out of range for slices outside, unless they are clipped."""
    if not clip and len(plan.indexed) == 1 and plan.row_axes == plan.indexed and not plan.part_axes:
        return b.reshape(_component(b, indices, 0), (math.prod(plan.batch),))
    first, inside = starts(b, plan, indices, clip=clip)
    whole = TensorType(S32, plan.row_shape)
    number: Value | None = None
    stride = 1
    for axis in reversed(plan.row_axes):
        position = _position(b, plan, axis, first)
        if position is not None:
            scaled = b.mul(position, stride) if stride != 1 else position
            number = scaled if number is None else b.add(number, scaled)
        stride *= plan.operand.shape[axis]
    number = b.full(whole, 0) if number is None else number
    if inside is not None:
        number = b.select(_over_rows(b, plan, inside), number, -1)
    return b.reshape(number, (math.prod(plan.row_shape),))


def one_hot(b: Builder, plan: Plan, operand: Value, indices: Value, *, clip: bool) -> tuple[Value, Value, Value | None]:
    """For a plan with a `one_hot_axis` of N positions: the operand as [batch, N]; the one-hot mask, pred[batch, N], of each index; and in
    that shape whether the index was in range (None: all are).
    """
    first, inside = starts(b, plan, indices, clip=clip)
    matrix = b.reshape(b.transpose(operand, one_hot_permutation(plan)), (math.prod(plan.batch), plan.operand.shape[plan.indexed[0]]))
    along = b.iota(TensorType(S32, matrix.shape), 1)
    here = b.eq(along, _over_columns(b, first[plan.indexed[0]], matrix.shape))
    return matrix, here, None if inside is None else _over_columns(b, inside, matrix.shape)


def one_hot_permutation(plan: Plan) -> tuple[int, ...]:
    """Batch axes in the index array's order, the indexed axis, then the others (of size 1)."""
    batch = tuple(axis for axis, _ in sorted(plan.batching, key=lambda pair: pair[1]))
    return (*batch, *plan.indexed, *plan.column_axes)


def _over_columns(b: Builder, x: Value, shape: Axes) -> Value:
    return b.broadcast(b.reshape(x, shape[:1]), shape, (0,))


def _over_rows(b: Builder, plan: Plan, x: Value) -> Value:
    """[batch...] -> [batch..., parts...]."""
    return b.broadcast(x, plan.row_shape, range(len(plan.batch)))


def _position(b: Builder, plan: Plan, axis: int, first: dict[int, Value]) -> Value | None:
    """Where along `axis` each row lies: start of its slice, place of its batch element, offset within the slice. None: 0 everywhere."""
    terms = [_over_rows(b, plan, first[axis])] if axis in first else []
    whole = TensorType(S32, plan.row_shape)
    terms += [b.iota(whole, place) for paired, place in plan.batching if paired == axis]
    if axis in plan.part_axes:
        terms.append(b.iota(whole, len(plan.batch) + plan.part_axes.index(axis)))
    return None if not terms else terms[0] if len(terms) == 1 else b.add(terms[0], terms[1])


def as_matrix(b: Builder, plan: Plan, operand: Value) -> Value:
    """The operand as [N, C]."""
    return b.reshape(b.transpose(operand, plan.permutation), plan.matrix)


def inverse(permutation: Axes) -> list[int]:
    """The permutation that undoes another."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)
