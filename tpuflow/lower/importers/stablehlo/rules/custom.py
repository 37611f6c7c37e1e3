"""Rules of custom calls of known meaning, one a target, and of random bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpuflow.isa.calls import HOST_CALL_PER_CHIP, HOST_CALLS
from tpuflow.jaxprs.shardings import LAST
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.importers.stablehlo.walk import RULES, STRUCTURAL
from tpuflow.lower.operations.complex import Number, Type
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.host_calls import call_host
from tpuflow.lower.operations.memories import device_put
from tpuflow.lower.operations.random import rng_bits, threefry_bits

_PLACEMENT = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "LayoutConstraint",
    "xla.sdy.FuncResultSharding",
)


def _identity(b: Builder, *operands: Value) -> tuple[Value, ...]:
    """Where an array lies: on the one device."""
    return operands


RULES.enter({f"custom_call {target}": _identity for target in _PLACEMENT})


def _put(b: Builder, x: Number, *, attributes: Mapping[str, Any]) -> Number:
    """What JAX's `device_put` within a program becomes."""
    return device_put(b, x, attributes["_xla_buffer_placement"])


STRUCTURAL.add("custom_call annotate_device_placement")
RULES.enter({"custom_call annotate_device_placement": _put}, **{"mhlo.frontend_attributes": "attributes"})


@RULES.lowers("stablehlo.rng_bit_generator")
def _rng_bit_generator(b: Builder, state: Value, *, rng_algorithm: str, types: tuple[TensorType, TensorType]) -> tuple[Value, Value]:
    """Of a state of two 64-bit integers, which are held as four words."""
    if state.shape != (2, 2):
        raise UnsupportedForm(f"the algorithm {rng_algorithm} with a state of {state.type.elems // 2} words of 64 bits; give it 2")
    drawn = threefry_bits if rng_algorithm == "THREE_FRY" else rng_bits
    following, bits = drawn(b, b.reshape(state, (4,)), types[1].shape, types[1].dtype)
    return b.reshape(following, (2, 2)), bits


@RULES.lowers("custom_call dce_sink")
def _dce_sink(b: Builder, x: Value) -> tuple[Value, ...]:
    """Keeps XLA from dropping what makes x; here nobody needs it."""
    return ()


@RULES.lowers(f"custom_call {LAST}")
def _last(b: Builder, *, types: tuple[TensorType]) -> Value:
    """Of a result that nobody wants."""
    return b.full(types[0], 0)


STRUCTURAL.update(f"custom_call {target}" for target in HOST_CALLS)


@RULES.lowers(*(f"custom_call {target}" for target in HOST_CALLS))
def _host_call(
    b: Builder,
    *operands: Number,
    call_target_name: str,
    backend_config: str,
    host_functions: Sequence[Callable[..., Any]],
    location: str,
    types: tuple[Type, ...],
) -> tuple[Number, ...]:
    if not backend_config.isdecimal() or int(backend_config) >= len(host_functions):
        raise UnsupportedForm(f"host function {backend_config!r} is not one of the {len(host_functions)} that are given")
    per_chip = call_target_name == HOST_CALL_PER_CHIP
    return call_host(b, host_functions[int(backend_config)], location, operands, types, per_chip=per_chip)
