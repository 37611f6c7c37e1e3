"""Tables of lowering rules, one function per imported operation: rules are registered by `lowers`, plain operations by `enter`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.complex import Number

Results = Number | tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A lowering rule `function(builder, *operands, **arguments) -> results`; `params`: (the imported operation's parameter, the argument
    it gives)."""

    function: Callable[..., Results]
    params: tuple[tuple[str, str], ...]

    def __call__(self, *args: Any, params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The results, always as a tuple; parameters that the rule does not read are not passed."""
        results = self.function(*args, **{argument: params[name] for name, argument in self.params if name in params})
        return results if isinstance(results, tuple) else (results,)


class Rules(dict[str, Rule]):
    """The rules of one importer, by the names of what it imports."""

    def lowers(self, *names: str) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
        """Enter the decorated function as the rule of the named operations. Its keyword-only arguments are the parameters it reads."""

        def add(function: Callable[..., Results]) -> Callable[..., Results]:
            self.enter(dict.fromkeys(names, function))
            return function

        return add

    def enter(self, operations: Mapping[str, Callable[..., Results]], **arguments: str) -> None:
        """Enter functions as the rules of operations with the same operands.

        A keyword-only argument takes the parameter of its name; `arguments` names those of other parameters: parameter -> argument.
        """
        for name, function in operations.items():
            assert name not in self, f"{name} has two rules"
            named = inspect.signature(function).parameters.values()
            own = {p.name: p.name for p in named if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in arguments.values()}
            self[name] = Rule(function, tuple((own | arguments).items()))


def bound(operation: Callable[..., Results], first: str) -> Callable[..., Results]:
    """The operation with its `first` argument bound (the name of a node, or a direction)."""

    @functools.wraps(operation)
    def rule(b: Builder, *operands: Value, **arguments: Any) -> Results:
        return operation(b, first, *operands, **arguments)

    return rule
