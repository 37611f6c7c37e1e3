"""Automatic casts: a function's jaxpr is interpreted again, with the types of each primitive chosen by a policy.

The interpreter binds the same primitives, so the result is an ordinary JAX function: grad, vmap, jit and remat apply to it, and it needs
nothing else of tpuflow. Its guarantees:

* the result has the types that the function itself would return for the same arguments;
* scalar literals (and what is computed from them alone) never widen an operation, like Python numbers in PyTorch;
* a matrix product whose only use is the addition of a smaller operand (a bias) keeps its fp32 sums until that addition, and the
  two are rounded once, as matrix units with a bias input do;
* gradients are those of the cast function: the products of the backward pass take operands in the compute type, sums over a
  broadcast (a bias gradient) run in fp32 and are rounded once;
* `custom_jvp` and `custom_vjp` rules are kept: their inputs are cast back to the types they were traced with;
* a primitive that the tables below do not name runs in the types it was traced with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tpuflow.amp.casting import AutocastInterpreter, Operand
from tpuflow.amp.policy import Policy, get_policy
from tpuflow.amp.rules import RULES

F = TypeVar("F", bound=Callable[..., Any])


def autocast(fn: F, policy: str | Policy, keep: tuple[Any, ...] = ()) -> F:
    """`fn` with the precision of `policy`: "list" policies cast by operation, "all" policies cast every floating argument.

    Arguments that are not arrays (flags, strings, Python numbers) are static. Arrays that `fn` closes over are used as they are, so
    under an "all" policy parameters should be arguments.

    keep: for the first positional arguments, trees of booleans (or prefixes of them): arrays that an "all" policy leaves in the type
      they have, such as the parameters of layers that are computed in fp32. A function does not show which of its operations
      normalise a batch: `fn` must cast what goes in and out of such a layer itself (`tpuflow.train` sees to both).

    Raises:
      ConfigError: no policy has that name.
    """
    row = get_policy(policy)
    if row.casts == "none":
        return fn

    @functools.wraps(fn)
    def cast_fn(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        kept = jax.tree.leaves(jax.tree.broadcast(((*keep, *[False] * (len(args) - len(keep))), False), (args, kwargs)))
        dynamic = [hasattr(leaf, "dtype") for leaf in leaves]

        def flat_fn(arrays: list[Any]) -> Any:
            remaining = iter(arrays)
            full = [next(remaining) if d else leaf for d, leaf in zip(dynamic, leaves, strict=True)]
            own_args, own_kwargs = jax.tree.unflatten(tree, full)
            return fn(*own_args, **own_kwargs)

        arrays = [(leaf, k) for d, leaf, k in zip(dynamic, leaves, kept, strict=True) if d]
        return _call(flat_fn, [leaf for leaf, _ in arrays], [k for _, k in arrays], row)

    return cast_fn  # type: ignore[return-value]


def _call(flat_fn: Callable[[list[Any]], Any], arrays: list[Any], kept: list[bool], policy: Policy) -> Any:
    """Trace `flat_fn` on `arrays` (cast, if the policy computes everything in one type) and interpret its jaxpr by the policy's rules."""
    cast_arrays = [a if k else policy.cast_inputs(a) for a, k in zip(arrays, kept, strict=True)]
    closed, shapes = jax.make_jaxpr(flat_fn, return_shape=True)(cast_arrays)
    if policy.casts == "all":
        shapes = jax.eval_shape(flat_fn, arrays)
    interpreter = AutocastInterpreter(RULES[policy.casts], policy.compute)
    results = interpreter.run(closed, [Operand(a) for a in cast_arrays])
    wanted, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [r.cast(s.dtype).value for r, s in zip(results, wanted, strict=True)])
