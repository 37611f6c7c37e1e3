"""Labels of a product's axes; the attributes of the graph's `conv`, where two labels may address one axis of the left operand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.isa.bounds import Bound
from tpuflow.lower.graph.graph import Node


@dataclass(frozen=True, slots=True)
class Slide:
    """How one axis of the left operand is addressed by two labels, its own (outer: i) and another (inner: r).

    The operand is read at position i * stride + r * dilation - low of the axis with `interior - 1` zeros between neighbours; outside of
    it, and between neighbours, it is zero. `size` is the length of the outer label. The dilation may be negative (a kernel read from
    its end), and so may `low`.
    """

    axis: int
    label: int
    size: int
    stride: int = 1
    dilation: int = 1
    low: int = 0
    interior: int = 1

    def __str__(self) -> str:
        marks = (("stride", self.stride, 1), ("dilation", self.dilation, 1), ("low", self.low, 0), ("interior", self.interior, 1))
        changed = "".join(f" {name} {value}" for name, value, usual in marks if value != usual)
        return f"{self.axis} size {self.size} label {self.label}{changed}"


Labels = tuple[int, ...]

DEFAULT = "default"
PRECISIONS = (DEFAULT, "high", "highest")
"""How exact products of f32 are on a chip whose matrix unit does not take f32: the names of `jax.lax.Precision`."""


@dataclass(frozen=True, slots=True)
class ConvLabels:
    """Labels of the axes of operands and result; every label is in at least two of them, counting the inner labels of slides as lhs's.

    `precision`: one of PRECISIONS. `bounds`: where rhs has elements; elsewhere it is padded with zeros. Neither those zeros nor what a
    slide reads outside of lhs, or between its elements, take part in products.
    """

    lhs: Labels
    rhs: Labels
    out: Labels
    slides: tuple[Slide, ...] = ()
    precision: str = DEFAULT
    bounds: tuple[Bound, ...] = ()

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> ConvLabels:
        """The attributes of a node."""
        return cls(attrs["lhs"], attrs["rhs"], attrs["out"], attrs["slides"], attrs["precision"], attrs["bounds"])

    def attrs(self) -> dict[str, Any]:
        """As the attributes of a node."""
        axes = {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}
        return axes | {"slides": self.slides, "precision": self.precision, "bounds": self.bounds}

    @property
    def patch(self) -> Labels:
        """Labels of lhs's axes once each slide is two of them: outer, inner."""
        inner = {s.axis: (s.label,) for s in self.slides}
        return tuple(label for axis, own in enumerate(self.lhs) for label in (own, *inner.get(axis, ())))

    @property
    def contracted(self) -> Labels:
        """Labels that are summed over, in the order of the sum."""
        return tuple(x for x in self.patch if x not in self.out)

    @property
    def columns(self) -> Labels:
        """Labels of the result that only rhs has, in the result's order."""
        return tuple(x for x in self.out if x not in self.patch)

    def sizes(self, lhs: Sequence[int], rhs: Sequence[int]) -> dict[int, int]:
        """Length of every label, given the operands' shapes."""
        slid = {s.axis: s.size for s in self.slides}
        outer = {label: slid.get(axis, n) for axis, (label, n) in enumerate(zip(self.lhs, lhs, strict=True))}
        return outer | dict(zip(self.rhs, rhs, strict=True))

    def problem(self, lhs: Sequence[int], rhs: Sequence[int]) -> str:
        """What is wrong with the labels for operands of these shapes; empty if nothing is."""
        axes = [s.axis for s in self.slides]
        if len(self.lhs) != len(lhs) or len(self.rhs) != len(rhs):
            return "one label for each axis of lhs and rhs"
        if len(set(axes)) != len(axes) or any(not 0 <= a < len(lhs) for a in axes):
            return "slides are of different axes of lhs"
        if any(s.stride < 1 or s.dilation == 0 or s.interior < 1 or s.size < 0 for s in self.slides):
            return "a slide has stride and interior above zero, a dilation other than zero and no negative size"
        sides = [set(x) for x in (self.patch, self.rhs, self.out)]
        if any(len(s) != len(x) for s, x in zip(sides, (self.patch, self.rhs, self.out), strict=True)):
            return "labels of one side must be different"
        if any(sum(x in s for s in sides) < 2 for x in set().union(*sides)):
            return "every label must be in at least two of lhs, rhs and result"
        sizes = self.sizes(lhs, rhs)
        if any(s.label not in self.rhs or s.label in self.out for s in self.slides):
            return "the inner label of a slide must be summed over, so in rhs and not in the result"
        if any(b.dilation < 1 or b.factors(self.rhs, ()) is None for b in self.bounds):
            return "a bound is of labels of rhs, with a dilation above zero"
        own = {label: n for axis, (label, n) in enumerate(zip(self.lhs, lhs, strict=True)) if axis not in axes}
        own |= {self.lhs[s.axis]: s.size for s in self.slides}
        return "" if all(sizes[x] == n for x, n in own.items()) else "labels shared by lhs and rhs must have equal lengths"


def product_labels(node: Node) -> ConvLabels:
    """The labels of a product. A dot's: lhs axes 0, 1, ...; rhs axes share the label of the lhs axis they meet, or get their own."""
    if node.op == "conv":
        return ConvLabels.of(node.attrs)
    lhs_rank, rhs_rank = (len(value.shape) for value in node.inputs)
    pairs = itertools.chain(
        zip(node.attrs["rhs_contract"], node.attrs["lhs_contract"], strict=True),
        zip(node.attrs["rhs_batch"], node.attrs["lhs_batch"], strict=True),
    )
    met = dict(pairs)
    lhs = tuple(range(lhs_rank))
    rhs = tuple(met.get(j, lhs_rank + j) for j in range(rhs_rank))
    batch = tuple(node.attrs["lhs_batch"])
    rows = tuple(x for x in lhs if x not in met.values())
    columns = tuple(x for x in rhs if x not in met.values())
    return ConvLabels(lhs, rhs, (*batch, *rows, *columns), precision=node.attrs["precision"])
