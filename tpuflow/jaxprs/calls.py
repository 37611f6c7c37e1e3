"""The primitives that are calls, and the parameter of each that holds the called jaxpr."""

from __future__ import annotations

from tpuflow.jaxprs.compat import Equation, Jaxpr

PLAIN_CALLS = {"closed_call": "call_jaxpr", "jit": "jaxpr"}
"""Calls that can be inlined without a loss."""
RECOMPUTED_CALLS = {"remat2": "jaxpr"}
"""`jax.checkpoint`, whose jaxpr the backward pass computes again."""
WHOLE_CALLS = {
    "composite": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "device_call": "jaxpr",
}
"""Calls with a meaning beyond their jaxpr's operations (their own derivative, a name, a device), which rewriting a function must keep."""
CALLS = PLAIN_CALLS | RECOMPUTED_CALLS | WHOLE_CALLS


def called(equation: Equation) -> Jaxpr:
    """The jaxpr, closed or not, that a call computes."""
    return equation.params[CALLS[equation.primitive.name]]
