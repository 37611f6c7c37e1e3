"""What arrays of a jaxpr are linear in others, row by row, and their values for a few rows of random numbers.

Two linear functions that agree about random numbers are the same (Freivalds, 1977): one that differed would agree by chance, with
probability 0. What makes an array linear in another is seen in the equations between them, each of which has a rule here.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpuflow.device.fast.rewriting import Variable
from tpuflow.jaxprs.compat import Equation, opened
from tpuflow.jaxprs.walk import walk

ROWS = 2
"""How many rows of an array are sampled."""
LARGEST = 2**21
"""Elements of the largest constants, and of the longest rows sampled together: they are gone through while the Program is translated."""


class NotLinear(Exception):
    """An equation's result is not linear in the sources, or its rows do not lie as theirs do."""


@dataclass(frozen=True)
class Sample:
    """Of an array [R M, ...], the part that belongs to the first few of R rows; of one that is a single row, or a constant, everything.

    values: that part, in float64. rows: R. sources: the arrays in which it is linear, each of R rows along its first axis; a constant has
    none, and counts as one row. products: how many products with constants lie between.
    """

    values: np.ndarray
    rows: int = 1
    sources: tuple[Variable, ...] = ()
    products: int = 0

    @property
    def taken(self) -> int:
        """How many rows are sampled."""
        return min(self.rows, ROWS)

    def cut(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the sampled part of such an array with the same rows."""
        if self.rows == 1:
            return tuple(shape)
        if not shape or shape[0] % self.rows:
            raise NotLinear
        return (shape[0] // self.rows * self.taken, *shape[1:])

    def beside(self, other: Sample) -> np.ndarray:
        """A constant's values beside the rows of `other`, if they are the same for all of them."""
        if self.values.ndim == 0 or other.taken == other.rows:
            return self.values
        if self.values.strides[0]:
            raise NotLinear
        return self.values[: len(other.values)]


def constant(atom: Any, value: Any) -> Sample | None:
    """The sample of a constant; None if it is not one of f32, empty or too large."""
    fits = atom.aval.dtype == np.float32 and 0 < math.prod(atom.aval.shape) <= LARGEST
    return Sample(np.asarray(value, np.float64)) if fits else None


def source(var: Variable, rows: int, seed: int) -> Sample:
    """The sample of an array that nothing is known of, a single row or `rows` along its first axis: random numbers, none near 0."""
    shape = var.aval.shape
    part = shape if rows == 1 else (min(rows, ROWS), *shape[1:])
    _check(var.aval.dtype == np.float32 and 0 < math.prod(part) <= LARGEST)
    rng = np.random.default_rng(seed)
    return Sample(rng.uniform(1, 2, part) * rng.choice((-1, 1), part), rows, (var,))


def result(equation: Equation, operands: Sequence[Sample]) -> Sample:
    """The sample of an equation's only result.

    Raises:
      NotLinear: it has none.
    """
    rule = RULES.get(equation.primitive.name)
    if rule is None or len(equation.outvars) != 1 or _type(equation).dtype != np.float32:
        raise NotLinear
    return rule(equation, *operands)


def _type(equation: Equation) -> Any:
    """The type of an equation's only result."""
    return equation.outvars[0].aval


def multiplies(equation: Equation) -> bool:
    """Whether it is a product of matrices."""
    name = equation.primitive.name
    return name == "dot_general" or (name == _CALL and any(map(multiplies, opened(equation.params["call"])[0].eqns)))


_CALL = "custom_vmap_call"


def _called(equation: Equation, *operands: Sample) -> Sample:
    def step(inner: Equation, given: list[Sample | None]) -> list[Sample | None]:
        if None in given:
            raise NotLinear
        return [result(inner, [x for x in given if x is not None])]

    (found,) = walk(equation.params["call"], operands, step, constant)
    if found is None:
        raise NotLinear
    return found


def _reshape(equation: Equation, x: Sample) -> Sample:
    shape = x.cut(_type(equation).shape)
    if not any(x.values.strides):  # one number, which need not be repeated
        return replace(x, values=np.broadcast_to(x.values.flat[0], shape))
    _check(x.values.size <= LARGEST)
    return replace(x, values=x.values.reshape(shape))


def _transpose(equation: Equation, x: Sample) -> Sample:
    order = equation.params["permutation"]
    _check(x.rows == 1 or order[0] == 0)
    return replace(x, values=x.values.transpose(order))


def _rev(equation: Equation, x: Sample) -> Sample:
    axes = equation.params["dimensions"]
    _check(x.rows == 1 or 0 not in axes)
    return replace(x, values=np.flip(x.values, axes))


def _broadcast(equation: Equation, x: Sample) -> Sample:
    axes, shape = equation.params["broadcast_dimensions"], equation.params["shape"]
    _check(x.rows == 1 or (axes[0] == 0 and len(x.values) * x.rows == shape[0] * x.taken))
    placed = [1] * len(shape)
    for axis, n in zip(axes, x.values.shape, strict=True):
        placed[axis] = n
    return replace(x, values=np.broadcast_to(x.values.reshape(placed), x.cut(shape)))


def _slice(equation: Equation, x: Sample) -> Sample:
    """Of the first axis everything, or the same place of each row."""
    starts, stops = equation.params["start_indices"], equation.params["limit_indices"]
    cuts = [slice(*bounds) for bounds in zip(starts, stops, equation.params["strides"] or [1] * len(starts), strict=True)]
    if x.rows == 1:
        return replace(x, values=x.values[tuple(cuts)])
    within = len(x.values) // x.taken
    first, length = cuts[0], _type(equation).shape[0]
    whole = (first.start, first.step, length) == (0, 1, x.rows * within)
    _check(whole or (first.step == within and first.start < within and length == x.rows))
    return replace(x, values=x.values[(slice(None) if whole else slice(first.start, None, within), *cuts[1:])])


def _same(_: Equation, x: Sample) -> Sample:
    return x


def _neg(_: Equation, x: Sample) -> Sample:
    return replace(x, values=-x.values)


def _add(equation: Equation, x: Sample, y: Sample) -> Sample:
    sign = -1 if equation.primitive.name == "sub" else 1
    if not x.sources or not y.sources:  # a constant but 0 makes it affine
        linear, other = (x, y) if x.sources else (y, x)
        _check(bool(linear.sources) and not other.beside(linear).any())
        return replace(linear, values=sign * linear.values if linear is y else linear.values)
    _check(x.rows == y.rows)
    return Sample(x.values + sign * y.values, x.rows, tuple(dict.fromkeys(x.sources + y.sources)), max(x.products, y.products))


def _mul(_: Equation, x: Sample, y: Sample) -> Sample:
    _check(bool(x.sources) != bool(y.sources))
    linear, other = (x, y) if x.sources else (y, x)
    return replace(linear, values=linear.values * other.beside(linear))


def _dot(equation: Equation, x: Sample, y: Sample) -> Sample:
    """Rows are rows of the left operand, the first axis of the result; or a batch, in which they all meet the same matrix."""
    _check(bool(x.sources) != bool(y.sources))
    (x_summed, y_summed), (x_batch, y_batch) = equation.params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    axes = [[next(letters) for _ in side.values.shape] for side in (x, y)]
    for i, j in (*zip(x_summed, y_summed, strict=True), *zip(x_batch, y_batch, strict=True)):
        axes[1][j] = axes[0][i]
    summed, batch = {axes[0][i] for i in x_summed}, [axes[0][i] for i in x_batch]
    out = batch + [a for side in axes for a in side if a not in summed and a not in batch]
    linear, other, own, others = (x, y, axes[0], axes[1]) if x.sources else (y, x, axes[1], axes[0])
    _check(linear.rows == 1 or out[:1] == own[:1])
    values = other.values
    if linear.rows > 1 and own[0] in others:
        at = others.index(own[0])
        _check(not values.strides[at] or values.shape[at] == 1)
        values = values.take(0, at)
        others.remove(own[0])
    spec = f"{''.join(own)},{''.join(others)}->{''.join(out)}"
    return replace(linear, values=np.einsum(spec, linear.values, values, optimize=True), products=linear.products + 1)


def _check(holds: bool) -> None:
    if not holds:
        raise NotLinear


RULES: Mapping[str, Callable[..., Sample]] = {
    "add": _add,
    "broadcast_in_dim": _broadcast,
    _CALL: _called,
    "dot_general": _dot,
    "mul": _mul,
    "neg": _neg,
    "optimization_barrier": _same,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "sub": _add,
    "transpose": _transpose,
}
