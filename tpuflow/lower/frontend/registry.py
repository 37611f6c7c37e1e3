"""The table of lowering rules: one function per jaxpr primitive, entered by `@lowers`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.lower.graph.graph import Value

Results = Value | tuple[Value, ...]


class UnsupportedForm(Exception):
    """Raised by a rule that does not cover this form of its primitive; the walk adds where it stands in the user's program."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A lowering rule `function(builder, *operands, **params) -> results` and the names of the parameters it reads.

    `keys`: it takes arrays of random keys in their physical form, u32[..., 2]. Other rules never see keys: the walk runs them on
    each of the two words.
    """

    function: Callable[..., Results]
    params: tuple[str, ...]
    keys: bool

    def __call__(self, *args: Any, params: Mapping[str, Any]) -> tuple[Value, ...]:
        """The results, always as a tuple; parameters that the rule does not read are not passed."""
        results = self.function(*args, **{name: params[name] for name in self.params if name in params})
        return results if isinstance(results, tuple) else (results,)


RULES: dict[str, Rule] = {}


def lowers(*primitives: str, keys: bool = False) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Enter the decorated function as the rule of the named primitives. Its keyword-only arguments are the parameters it reads."""

    def enter(function: Callable[..., Results]) -> Callable[..., Results]:
        named = inspect.signature(function).parameters.values()
        params = tuple(p.name for p in named if p.kind is inspect.Parameter.KEYWORD_ONLY)
        for primitive in primitives:
            assert primitive not in RULES, f"{primitive} has two rules"
            RULES[primitive] = Rule(function, params, keys)
        return function

    return enter
