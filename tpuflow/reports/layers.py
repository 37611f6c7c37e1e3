"""Which layer a kernel or a buffer belongs to: module paths and phases out of the name stacks that JAX and Flax leave."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, UPDATE)
RECOMPUTED = ("rematted_computation",)
_WRAPPED = re.compile(r"(\w+)\((.*)\)")
_CONTROL = frozenset(("while", "body", "cond", "scan", "checkpoint", "remat", *RECOMPUTED))


@dataclass(frozen=True, slots=True)
class Layer:
    """Where in the model something belongs: `path` is the Flax module path ("" outside of all modules), `phase` one of `PHASES`.

    `recomputed` says that it is forward work done again by `jax.checkpoint` in the backward pass.
    """

    path: str
    phase: str
    recomputed: bool = False


@functools.lru_cache(maxsize=65536)
def layer_of(scope: str) -> Layer:
    """The layer of a name stack: "transpose(jvp(LeNet5))/LeNet5._dense/fc1" is LeNet5/fc1, backward.

    Transformations wrap a part in their name (jvp, transpose, vmap, jit). Left out are methods other than __call__, which appear as
    Class.method, names of control flow, and the equations of `einsum`.
    """
    parts, wrappers = [], set()
    for part in _split(scope):
        name, around = _unwrap(part)
        wrappers |= around
        if name and "." not in name and "->" not in name and name not in _CONTROL:
            parts.append(name)
    again = any(word in scope for word in RECOMPUTED)
    return Layer("/".join(dict.fromkeys(parts)), _phase(wrappers, again=again), again)


def _phase(wrappers: set[str], *, again: bool) -> str:
    if "transpose" in wrappers or again:
        return BACKWARD
    return FORWARD if "jvp" in wrappers else UPDATE


def _split(scope: str) -> list[str]:
    """The parts between slashes that are in no parentheses."""
    parts, depth, last = [], 0, 0
    for at, letter in enumerate(scope):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and not depth:
            parts.append(scope[last:at])
            last = at + 1
    return [*parts, scope[last:]]


def _unwrap(part: str) -> tuple[str, set[str]]:
    """A part without the transformations around it, and their names; of a jitted function nothing is left."""
    wrappers: set[str] = set()
    while (found := _WRAPPED.fullmatch(part)) is not None:
        wrappers.add(found[1])
        part = "" if found[1] in ("jit", "pjit") else found[2]
    return part, wrappers
