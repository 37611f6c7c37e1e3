"""The table of lowering rules, a function for each jaxpr primitive: entered by `@lowers`; operations that need none, by `enter`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value

Results = Value | tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A lowering rule `function(builder, *operands, **arguments) -> results`; `params`: (the primitive's parameter, the argument it gives).

    `keys`: it takes arrays of random keys in their physical form, u32[..., 2]. Other rules never see keys: the walk runs them on
    each of the two words.
    """

    function: Callable[..., Results]
    params: tuple[tuple[str, str], ...]
    keys: bool

    def __call__(self, *args: Any, params: Mapping[str, Any]) -> tuple[Value, ...]:
        """The results, always as a tuple; parameters that the rule does not read are not passed."""
        results = self.function(*args, **{argument: params[name] for name, argument in self.params if name in params})
        return results if isinstance(results, tuple) else (results,)


RULES: dict[str, Rule] = {}


def lowers(*primitives: str, keys: bool = False) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Enter the decorated function as the rule of the named primitives. Its keyword-only arguments are the parameters it reads."""

    def add(function: Callable[..., Results]) -> Callable[..., Results]:
        enter(dict.fromkeys(primitives, function), keys=keys)
        return function

    return add


def enter(operations: Mapping[str, Callable[..., Results]], *, keys: bool = False, **arguments: str) -> None:
    """Enter operations as the rules of primitives with the same operands.

    A keyword-only argument takes the parameter of its name; `arguments` names those of other parameters: parameter -> argument.
    """
    for primitive, operation in operations.items():
        assert primitive not in RULES, f"{primitive} has two rules"
        named = inspect.signature(operation).parameters.values()
        own = {p.name: p.name for p in named if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in arguments.values()}
        RULES[primitive] = Rule(operation, tuple((own | arguments).items()), keys)


def bound(operation: Callable[..., Results], first: str) -> Callable[..., Results]:
    """An operation with its argument before the operands, the name of a node or a direction, given already."""

    @functools.wraps(operation)
    def rule(b: Builder, *operands: Value, **arguments: Any) -> Results:
        return operation(b, first, *operands, **arguments)

    return rule
