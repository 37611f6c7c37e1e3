"""Which primitives are calls, and where each has the jaxpr that it calls: one list for all who read jaxprs."""

from __future__ import annotations

from tpuflow.jaxprs.compat import Equation, Jaxpr

PLAIN_CALLS = {"closed_call": "call_jaxpr", "jit": "jaxpr"}
"""What is called is there in other words: the operations in it could stand in its place."""
RECOMPUTED_CALLS = {"remat2": "jaxpr"}
"""`jax.checkpoint`: the backward pass computes what is called once more."""
WHOLE_CALLS = {
    "composite": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "device_call": "jaxpr",
}
"""Calls that say more than the operations in them do (a derivative of their own, a name, a device): rewriting a function keeps them."""
CALLS = PLAIN_CALLS | RECOMPUTED_CALLS | WHOLE_CALLS


def called(equation: Equation) -> Jaxpr:
    """The jaxpr, closed or not, that a call computes."""
    return equation.params[CALLS[equation.primitive.name]]
