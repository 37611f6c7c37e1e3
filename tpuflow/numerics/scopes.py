"""From the name stack of an equation to the layer it belongs to and the pass it is part of."""

from __future__ import annotations

import functools

from tpuflow.reports.layers import BACKWARD, FORWARD, UPDATE, layer_of

__all__ = ["BACKWARD", "FORWARD", "UPDATE", "place_of"]


@functools.lru_cache(maxsize=4096)
def place_of(scope: str, model: str) -> tuple[str, str]:
    """(module path, pass) of a name stack; the path without the model's own name, unless nothing else is left.

    What `jax.checkpoint` recomputes in the backward pass are activations, so it counts as forward.
    """
    found = layer_of(scope)
    path = found.path.removeprefix(model).removeprefix("/") or model
    return path, FORWARD if found.recomputed else found.phase
