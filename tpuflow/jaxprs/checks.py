"""Support for `jax.experimental.checkify` in primitives that call a jaxpr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import checkify

from tpuflow.jaxprs.compat import ClosedJaxpr, Primitive


def checks_within(primitive: Primitive, call: Callable[..., list[Any]]) -> None:
    """Register a rule with `checkify`: it instruments the jaxpr that `primitive` calls (its parameter `jaxpr`), and the call returns the
    errors.

    call: call(arguments, jaxpr=..., other parameters) binds the primitive.
    """

    def rule(error: Any, enabled: Any, *arguments: Any, jaxpr: ClosedJaxpr, **params: Any) -> Any:
        leaves, tree = jax.tree.flatten(error)
        given = [*leaves, *arguments]
        checked, out_tree, _ = checkify.jaxpr_to_checkify_jaxpr(jaxpr, enabled, tree, *map(jax.typeof, given))
        return jax.tree.unflatten(out_tree, call(given, jaxpr=checked, **params))

    checkify.error_checks[primitive] = rule
