"""The graph's products: which axes of a `dot` or a `conv` meet."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from types import MappingProxyType

from tpuflow.isa.contraction import Contraction
from tpuflow.lower.graph.blocking import depth_block
from tpuflow.lower.graph.graph import Node

Axes = tuple[int, ...]
DEFAULT = "default"
PRECISIONS = (DEFAULT, "high", "highest")
"""How exact products of f32 are on a chip whose matrix unit does not take f32: the names of `jax.lax.Precision`."""


def contraction_of(node: Node) -> Contraction:
    """The labels of a product. A dot's: lhs axes 0, 1, ...; rhs axes share the label of the lhs axis they meet, or get their own."""
    if node.op == "conv":
        return node.attrs["contraction"]
    (lhs, rhs), attrs = node.inputs, node.attrs
    contracted, batch = (attrs["lhs_contract"], attrs["rhs_contract"]), (attrs["lhs_batch"], attrs["rhs_batch"])
    return dot_contraction(len(lhs.shape), len(rhs.shape), *contracted, *batch)


@functools.lru_cache(maxsize=256)
def dot_contraction(lhs_rank: int, rhs_rank: int, lhs_contract: Axes, rhs_contract: Axes, lhs_batch: Axes, rhs_batch: Axes) -> Contraction:
    """The labels of a dot of operands of these ranks; cached, because passes ask often and a program has few kinds of dots."""
    met = dict(itertools.chain(zip(rhs_contract, lhs_contract, strict=True), zip(rhs_batch, lhs_batch, strict=True)))
    lhs = tuple(range(lhs_rank))
    rhs = tuple(met.get(j, lhs_rank + j) for j in range(rhs_rank))
    rows = tuple(x for x in lhs if x not in met.values())
    columns = tuple(x for x in rhs if x not in met.values())
    return Contraction(lhs, rhs, (*lhs_batch, *rows, *columns))


def sizes_of(node: Node) -> Mapping[int, int]:
    """Length of every label of a product."""
    return _sizes(contraction_of(node), *(value.shape for value in (*node.inputs, node.result)))


def block_of(node: Node) -> Mapping[int, int]:
    """The shape of a block of a product's sum, by contracted label (`depth_block`)."""
    return _block(contraction_of(node), *(value.shape for value in (*node.inputs, node.result)))


@functools.lru_cache(maxsize=1024)
def _sizes(whole: Contraction, lhs: Axes, rhs: Axes, out: Axes) -> Mapping[int, int]:
    return MappingProxyType(whole.by_label(lhs, rhs, out))


@functools.lru_cache(maxsize=1024)
def _block(whole: Contraction, lhs: Axes, rhs: Axes, out: Axes) -> Mapping[int, int]:
    return MappingProxyType(depth_block(whole, _sizes(whole, lhs, rhs, out)))


def conv_problem(contraction: Contraction, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]) -> str:
    """What is wrong with a `conv` of operands and a result of these shapes; empty if nothing is.

    A sliding axis reads lhs where its bound says; its inner label is summed over. Other bounds say where rhs has elements.
    """
    if problem := contraction.problem(len(lhs), len(rhs), len(out)):
        return problem
    sliding = contraction.sliding
    if any(s.stride < 1 or s.dilation == 0 for s in sliding):
        return "a sliding axis has a stride above zero and a dilation other than zero"
    if any(s.label not in contraction.rhs or s.label in contraction.out for s in sliding):
        return "the inner label of a sliding axis must be summed over, so in rhs and not in the result"
    read = [contraction.bound_of(s) for s in sliding]
    if any(b is None or b.extent != lhs[s.axis] for b, s in zip(read, sliding, strict=True)) or len(contraction.lhs_bounds) != len(sliding):
        return "every sliding axis has one bound, of its own extent, and no other axis of lhs has any"
    if any(b.dilation < 1 for b in contraction.bounds) or any(contraction.along_rhs(b) is None for b in contraction.rhs_bounds):
        return "a bound is of a sliding axis or of labels of rhs, with a dilation above zero"
    return "labels shared by operands and result must have equal lengths" if contraction.differing(lhs, rhs, out) else ""
