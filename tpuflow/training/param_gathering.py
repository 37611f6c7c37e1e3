"""Where a function of whole parameters gathers the ones that are sharded, and where it scatters their gradients (ZeRO's stages 2 and 3).

The function is traced for whole arrays, and its jaxpr is interpreted again with the shards in their place:

- A scan reads one layer of a stack of parameters, [layers, ...], in each trip. The layer is gathered inside of the scan's body, so that a
  chip holds one whole layer at a time and not the whole stack; its gradient is scattered there too.
- A `jax.checkpoint` region gathers its own parameters, so that its recomputation in the backward pass gathers them again.
- Every other parameter is gathered once, before the function begins.
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
from tpuflow.training.shards import Axis, rematerialize_moves

Reader = tuple[Equation | None, int]
"""An equation that reads a value, and the number of the operand that the value is; None stands for the results of the jaxpr."""


def with_gathered_params(axis: Axis, function: Callable[[Any], Any], tree: Any, like: Any, sharded: Any) -> Any:
    """Call a function of whole arrays on a tree of shards, which are gathered where the function reads them (stage 3, and evaluations).

    The gradient of a shard is the shard of the gradients' mean over the chips.

    like: the shapes and types of the whole arrays. sharded: a tree of booleans, which arrays of `tree` are shards.
    """
    held = jax.tree.map(lambda x, w, cut: _Sharded(x, w.shape, axis) if cut else x, tree, like, sharded)
    return _call(function, held, like)


def with_scattered_grads(axis: Axis, function: Callable[[Any], Any], grad_inputs: Any, whole: Any, sharded: Any) -> Any:
    """Call a function of whole arrays, whose gradients are scattered as soon as they are computed (stage 2).

    grad_inputs: what to differentiate by: for a sharded array one of a shard's shape, whose gradient is the shard of the gradients' mean
    over the chips; for any other the array itself. sharded: a tree of booleans, which arrays have sharded gradients.
    """
    held = jax.tree.map(lambda x, w, cut: _Sharded(x, w.shape, axis, w) if cut else x, grad_inputs, whole, sharded)
    return _call(function, held, whole)


def _call(function: Callable[[Any], Any], held: Any, like: Any) -> Any:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(like)
    return jax.tree.unflatten(jax.tree.structure(shapes), _run(closed, jax.tree.leaves(held)))


def scanned_inputs(jaxpr: ClosedJaxpr | Jaxpr) -> list[bool]:
    """For each input, whether scans alone read it, each as an operand that it slices along the first axis."""
    return [_are_scans(readers) for readers in _readers(jaxpr)]


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A sharded array of this shape. With `whole`, the chip holds the array too, and `shard` only takes its gradient."""

    shard: jax.Array
    shape: tuple[int, ...]
    axis: Axis
    whole: jax.Array | None = None

    @property
    def arrays(self) -> _Arrays:
        """Its arrays, as a scan or a region takes them for operands."""
        return self.shard, self.whole

    def with_arrays(self, arrays: _Arrays) -> _Sharded:
        """The same with other arrays, such as the operands of a scan or a region."""
        return replace(self, shard=arrays[0], whole=arrays[1])

    def layer(self, arrays: _Arrays) -> _Sharded:
        """One layer of this stack, given its slices of `arrays`."""
        return _Sharded(arrays[0], self.shape[1:], self.axis.per_layer, arrays[1])

    def gather(self) -> jax.Array:
        """The whole array, whose gradient is scattered as soon as it is computed."""
        if self.whole is None:
            return self.axis.gather_param(self.shard, self.shape)
        return self.axis.with_grad_shard(self.whole, self.shard)


_Arrays = tuple[jax.Array, jax.Array | None]
"""A shard and, where the chip holds it, the whole array."""


def _run(jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, whose operands are arrays and `_Sharded`s. Scans and regions that gather by themselves get the latter."""
    given = [o if _reader_gathers(readers) else _gathered(o) for o, readers in zip(operands, _readers(jaxpr), strict=True)]
    return walk(jaxpr, given, _step, array_of)


def _step(eqn: Equation, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name in PLAIN_CALLS:
        return _run(called(eqn), operands)
    rule = _RULES.get(eqn.primitive.name)
    return bind_again(eqn, list(map(_gathered, operands))) if rule is None else rule(eqn, operands)


def _scan(eqn: Equation, operands: list[Any]) -> list[Any]:
    """The scan with a body that gathers its layer, once more in the backward pass, and scatters the layer's gradients."""
    jaxpr = eqn.params["jaxpr"]
    consts, carries, stacked = scan_parts(
        eqn, [o if isinstance(o, _Sharded) and o.axis.is_stack(o.shape) else _gathered(o) for o in operands]
    )

    def trip(consts: list[Any], carry: list[Any], items: list[Any]) -> list[Any]:
        layer = [of.layer(x) if isinstance(of, _Sharded) else x for of, x in zip(stacked, items, strict=True)]
        return _run(jaxpr, [*consts, *carry, *layer])

    gathers = any(isinstance(of, _Sharded) and of.whole is None for of in stacked)
    again = rematerialize_moves(trip) if gathers else trip

    def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
        results = again(consts, carry, items)
        return results[: len(carry)], results[len(carry) :]

    carry, made = bind_scan(eqn, body, carries, list(map(_arrays_of, stacked)))
    return [*carry, *made]


def _region(eqn: Equation, operands: list[Any]) -> list[Any]:
    """A `jax.checkpoint` region that gathers its own parameters; without a policy, only its operands are saved for the backward pass."""
    jaxpr, prevents, policy = called(eqn), eqn.params["prevent_cse"], eqn.params["policy"]

    def region(*values: Any) -> list[Any]:
        return _run(jaxpr, [of.with_arrays(x) if isinstance(of, _Sharded) else x for of, x in zip(operands, values, strict=True)])

    values = list(map(_arrays_of, operands))
    if policy is not None:
        return jax.checkpoint(region, prevent_cse=prevents, policy=policy)(*values)
    return _checkpoint_operands(region, prevents=prevents if isinstance(prevents, bool) else any(prevents))(*values)


def _checkpoint_operands(region: Callable[..., list[Any]], *, prevents: bool) -> Callable[..., list[Any]]:
    """`jax.checkpoint` that saves its operands and nothing else, whatever the policy of a checkpoint around it would save.

    prevents: as `prevent_cse`: the recomputation begins at a barrier, without which the compiler would merge it with the first one.
    """

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        return region(*operands), operands

    def backward(operands: Any, cotangents: list[Any]) -> Any:
        return jax.vjp(region, *(lax.optimization_barrier(operands) if prevents else operands))[1](cotangents)

    computed = jax.custom_vjp(region)
    computed.defvjp(forward, backward)
    return computed


_RULES: Mapping[str, Callable[[Equation, list[Any]], list[Any]]] = {"scan": _scan, **dict.fromkeys(RECOMPUTED_CALLS, _region)}


def _gathered(value: Any) -> Any:
    return value.gather() if isinstance(value, _Sharded) else value


def _arrays_of(value: Any) -> Any:
    return value.arrays if isinstance(value, _Sharded) else value


def _readers(jaxpr: ClosedJaxpr | Jaxpr) -> list[list[Reader]]:
    """The readers of each input, also those inside of plain calls."""
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
    """What stands for a constant: it is no input."""


def _reader_gathers(readers: Sequence[Reader]) -> bool:
    """Whether an input is gathered by its readers: by scans, or by one region (of several regions each would send it again)."""
    return _are_scans(readers) or (len(readers) == 1 and _name(readers[0][0]) in RECOMPUTED_CALLS)


def _are_scans(readers: Sequence[Reader]) -> bool:
    return bool(readers) and all(_is_scanned(eqn, at) for eqn, at in readers)


def _is_scanned(eqn: Equation | None, at: int) -> bool:
    """Whether an equation slices its operand number `at` along the first axis, one slice a trip."""
    if eqn is not None and _name(eqn) == "scan":
        return at >= eqn.params["num_consts"] + eqn.params["num_carry"]
    return eqn is not None and _name(eqn) in RECOMPUTED_CALLS and scanned_inputs(called(eqn))[at]


def _name(eqn: Equation | None) -> str:
    return "" if eqn is None else eqn.primitive.name
