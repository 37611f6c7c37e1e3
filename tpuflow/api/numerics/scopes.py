"""From the name stack of an equation to the layer it belongs to and the pass it is part of."""

from __future__ import annotations

import re

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
_INSIDE = re.compile(r"\w+\(([^()]*)\)")
_NO_LAYER = frozenset({"", "checkpoint", "rematted_computation"})


def phase_of(scope: str) -> str:
    """Which pass an equation belongs to: JAX marks what it differentiates with jvp(...), and what runs backward with transpose(...).

    What `jax.checkpoint` computes again in the backward pass is part of the forward pass.
    """
    if "transpose(" in scope:
        return FORWARD if "rematted_computation" in scope.rpartition("transpose(")[2] and "jvp(" in scope else BACKWARD
    return FORWARD if "jvp(" in scope else UPDATE


def layer_of(scope: str, model: str) -> str:
    """The module path "Block_0/Dense_1" in a name stack "jvp(Model)/Model.helper/Block_0/Dense_1"; the model's name if it is empty.

    Names of methods ("Model.helper") are no part of a module path.
    """
    while _INSIDE.search(scope):
        scope = _INSIDE.sub(r"\1", scope)
    parts = [part for part in scope.split("/") if part not in _NO_LAYER and "." not in part]
    while parts and parts[0] == model:
        parts = parts[1:]
    return "/".join(parts) or model
