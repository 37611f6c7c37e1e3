"""Functions of whole arrays, of the shares of them that chips hold: each array is gathered where it is needed, and for as long; and its
gradient is scattered where it is made.

A scan takes the parameters of its layers, [layers, ...], apart, one a trip. Gathered before the scan, a chip would have all layers at once;
gathered in its body, it has one. So it is with gradients: scattered behind the scan, they are those of all layers; in its body, of one. A
region that the backward pass computes again (`jax.checkpoint`) gathers its own parameters, and so does it again. Everything else is
gathered once, first. The function is traced for whole arrays, which shows who reads what, and its jaxpr is walked with what a chip holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax

from tpuflow.jaxprs.bind import bind_again, bind_scan, scan_parts
from tpuflow.jaxprs.calls import PLAIN_CALLS, RECOMPUTED_CALLS, called
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr, opened
from tpuflow.jaxprs.walk import array_of, walk
from tpuflow.training.shards import Axis, keeping_no_moves

Reader = tuple[Equation | None, int]
"""Who reads a value, and as which of its operands; None is the end, where the value is a result."""


def on_whole(axis: Axis, function: Callable[[Any], Any], tree: Any, like: Any, shared: Any) -> Any:
    """A function of a tree of whole arrays, of what a chip holds of them. Its gradients are shares of the means over the chips.

    like: the shapes and types of the whole arrays. shared: which of them are shares.
    """
    held = jax.tree.map(lambda x, w, cut: _Share(x, w.shape, axis) if cut else x, tree, like, shared)
    return _of_held(function, held, like)


def lending(axis: Axis, function: Callable[[Any], Any], places: Any, whole: Any, shared: Any) -> Any:
    """A function of a tree of arrays that chips have whole, whose gradients go to `places`: shares of the means over the chips.

    shared: of which arrays. In place of the others is what the function is to have of them.
    """
    held = jax.tree.map(lambda x, w, cut: _Share(x, w.shape, axis, w) if cut else x, places, whole, shared)
    return _of_held(function, held, whole)


def _of_held(function: Callable[[Any], Any], held: Any, like: Any) -> Any:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(like)
    return jax.tree.unflatten(jax.tree.structure(shapes), _run(closed, jax.tree.leaves(held)))


def scanned(jaxpr: ClosedJaxpr | Jaxpr) -> list[bool]:
    """Which inputs are read by scans alone, that take them apart along their first axis."""
    return [_are_scans(readers) for readers in _readers(jaxpr)]


@dataclass(frozen=True, slots=True)
class _Share:
    """What a chip has of an array of this shape: a share, and `whole` if it has that too; then the share is where its gradient goes."""

    share: jax.Array
    shape: tuple[int, ...]
    axis: Axis
    whole: jax.Array | None = None

    @property
    def arrays(self) -> _Arrays:
        """What it is made of."""
        return self.share, self.whole

    def of(self, arrays: _Arrays) -> _Share:
        """The same of other arrays."""
        return replace(self, share=arrays[0], whole=arrays[1])

    def layer(self, arrays: _Arrays) -> _Share:
        """That of a layer of this stack."""
        return _Share(arrays[0], self.shape[1:], self.axis.of_layers, arrays[1])

    def for_a_while(self) -> jax.Array:
        """The whole array, whose gradient is scattered as soon as it is made."""
        return self.axis.whole_for_a_while(self.share, self.shape) if self.whole is None else self.axis.lent(self.whole, self.share)


_Arrays = tuple[jax.Array, jax.Array | None]
"""A share and, if a chip has that, the whole array."""


def _run(jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr of arrays and shares. What its scans and regions gather by themselves, they get as shares."""
    given = [o if _gather_it(readers) else _whole(o) for o, readers in zip(operands, _readers(jaxpr), strict=True)]
    return walk(jaxpr, given, _step, array_of)


def _step(eqn: Equation, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name in PLAIN_CALLS:
        return _run(called(eqn), operands)
    rule = _RULES.get(eqn.primitive.name)
    return bind_again(eqn, list(map(_whole, operands))) if rule is None else rule(eqn, operands)


def _scan(eqn: Equation, operands: list[Any]) -> list[Any]:
    """The same loop, with a body that gathers its layer, in the backward pass once more, and scatters that layer's gradients."""
    jaxpr = eqn.params["jaxpr"]
    consts, carries, stacked = scan_parts(eqn, [o if isinstance(o, _Share) and o.axis.is_stack(o.shape) else _whole(o) for o in operands])

    def trip(consts: list[Any], carry: list[Any], items: list[Any]) -> list[Any]:
        layer = [of.layer(x) if isinstance(of, _Share) else x for of, x in zip(stacked, items, strict=True)]
        return _run(jaxpr, [*consts, *carry, *layer])

    gathers = any(isinstance(of, _Share) and of.whole is None for of in stacked)
    again = keeping_no_moves(trip) if gathers else trip

    def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
        results = again(consts, carry, items)
        return results[: len(carry)], results[len(carry) :]

    carry, made = bind_scan(eqn, body, carries, list(map(_own, stacked)))
    return [*carry, *made]


def _region(eqn: Equation, operands: list[Any]) -> list[Any]:
    """The same region, which gathers by itself; of one that is to keep nothing the backward pass has the operands alone."""
    jaxpr, prevents, policy = called(eqn), eqn.params["prevent_cse"], eqn.params["policy"]

    def region(*values: Any) -> list[Any]:
        return _run(jaxpr, [of.of(x) if isinstance(of, _Share) else x for of, x in zip(operands, values, strict=True)])

    values = list(map(_own, operands))
    if policy is not None:
        return jax.checkpoint(region, prevent_cse=prevents, policy=policy)(*values)
    return _computed_again(region, prevents=prevents if isinstance(prevents, bool) else any(prevents))(*values)


def _computed_again(region: Callable[..., list[Any]], *, prevents: bool) -> Callable[..., list[Any]]:
    """`jax.checkpoint` whose inside no policy of a checkpoint around it looks into: there is nothing in it to keep.

    prevents: whether the region begins at a barrier the second time, without which it would be found to be the first time once more.
    """

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        return region(*operands), operands

    def backward(operands: Any, cotangents: list[Any]) -> Any:
        return jax.vjp(region, *(lax.optimization_barrier(operands) if prevents else operands))[1](cotangents)

    computed = jax.custom_vjp(region)
    computed.defvjp(forward, backward)
    return computed


_RULES: Mapping[str, Callable[[Equation, list[Any]], list[Any]]] = {"scan": _scan, **dict.fromkeys(RECOMPUTED_CALLS, _region)}


def _whole(value: Any) -> Any:
    return value.for_a_while() if isinstance(value, _Share) else value


def _own(value: Any) -> Any:
    return value.arrays if isinstance(value, _Share) else value


def _readers(jaxpr: ClosedJaxpr | Jaxpr) -> list[list[Reader]]:
    """Who reads each input, functions that are called in other words looked into."""
    inputs = range(len(opened(jaxpr)[0].invars))
    found: list[list[Reader]] = [[] for _ in inputs]

    def step(eqn: Equation, operands: list[int | None]) -> list[int | None]:
        if eqn.primitive.name in PLAIN_CALLS:
            return walk(called(eqn), operands, step, _no_input)
        for at, number in enumerate(operands):
            if number is not None:
                found[number].append((eqn, at))
        return [None for _ in eqn.outvars]

    for number in walk(jaxpr, list(inputs), step, _no_input):
        if number is not None:
            found[number].append((None, 0))
    return found


def _no_input(atom: Any, value: Any) -> None:
    """What stands for constants where inputs are counted."""


def _gather_it(readers: Sequence[Reader]) -> bool:
    """Whether who reads an input is to gather it: scans, or one region. (Several regions would each send it.)"""
    return _are_scans(readers) or (len(readers) == 1 and _name(readers[0][0]) in RECOMPUTED_CALLS)


def _are_scans(readers: Sequence[Reader]) -> bool:
    return bool(readers) and all(_takes_apart(eqn, at) for eqn, at in readers)


def _takes_apart(eqn: Equation | None, at: int) -> bool:
    if eqn is not None and _name(eqn) == "scan":
        return at >= eqn.params["num_consts"] + eqn.params["num_carry"]
    return eqn is not None and _name(eqn) in RECOMPUTED_CALLS and scanned(called(eqn))[at]


def _name(eqn: Equation | None) -> str:
    return "" if eqn is None else eqn.primitive.name
