"""A call of the host's Python to be put in an executable for JAX's CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import callback, effects
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


def call_python(function: Callable[..., Any], types: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[Any]) -> list[Any]:
    """What a function of NumPy arrays returns, arrays of these types, in what is traced for JAX's CPU.

    It is called once each time that its place is come to, in no order but that in which calls need each other's results.
    """
    avals = tuple(ShapedArray(t.shape, t.dtype) for t in types)
    return call_python_p.bind(*arrays, function=function, avals=avals)


call_python_p = Primitive("call_python")
call_python_p.multiple_results = True


@call_python_p.def_effectful_abstract_eval
def _types(*_: Any, function: Callable[..., Any], avals: tuple[Any, ...]) -> Any:
    """With an effect, so that it is never left out."""
    return list(avals), {_CALLS}


class _Calls(effects.Effect):
    """That Python is called. That of an `io_callback` cannot be in a `cond` or a `while_loop` whose predicate a `vmap` batches, where both
    branches, or further trips, run for all: the function called says itself for which lanes that counts."""


_CALLS = _Calls()
effects.lowerable_effects.add_type(_Calls)
effects.control_flow_allowed_effects.add_type(_Calls)


def _lower(context: Any, *operands: Any, function: Callable[..., Any], avals: tuple[Any, ...]) -> Any:
    """Not by `io_callback`, which looks for a CPU in JAX's list of backends. Of several devices that run one program between them the first
    calls; those of a `shard_map` call each."""
    sharding = callback._callback_op_sharding(context.module_context.axis_context, None, context.avals_out)
    results, _, _ = callback.emit_python_callback(
        context, function, None, list(operands), context.avals_in, context.avals_out, has_side_effect=True, sharding=sharding
    )
    return results


mlir.register_lowering(call_python_p, _lower, platform="cpu", cacheable=False)
