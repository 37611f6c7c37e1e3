"""Graph breaks: where dynamo could not go on, why, and what of a model runs on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class GraphBreakWarning(UserWarning):
    """A model is several graphs: what lies between them runs in PyTorch, not on the device."""


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where a graph ended before the function did, and why."""

    line: str
    reason: str

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `torch.compile` makes of a call: the operations of each graph, and what broke it."""

    graphs: tuple[int, ...]
    breaks: tuple[GraphBreak, ...]

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.graphs))
        lines = [f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)} of {counts or 'no'} operations, {len(self.breaks)} breaks"]
        return "\n".join([*lines, *(f"  {found}" for found in self.breaks)])


_WARNED: set[GraphBreak] = set()


def warn_of_break(graph_module: torch.fx.GraphModule) -> None:
    """Say once for each place and reason that a graph ends there."""
    found = break_of(graph_module)
    if found is not None and found not in _WARNED:
        _WARNED.add(found)
        warnings.warn(
            f"{found} The model is cut there: what lies between its graphs runs in PyTorch, not on the device "
            "(tpuflow.torch.explain lists all breaks).",
            GraphBreakWarning,
            stacklevel=2,
        )


def break_of(graph_module: torch.fx.GraphModule) -> GraphBreak | None:
    """The break that a captured graph ends with, if it does."""
    cause = getattr(graph_module, "compile_subgraph_reason", None)
    if cause is None or not cause.graph_break:
        return None
    frame = cause.user_stack[-1] if cause.user_stack else None
    line = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "the model"
    return GraphBreak(line, _in_words(str(cause.reason)))


def _in_words(reason: str) -> str:
    """What dynamo says of a break, without its debugging context; where it only says that it stopped, what it counted last."""
    counted = list(torch._dynamo.utils.counters["graph_break"])
    text = counted[-1] if reason == "step_unsupported" and counted else reason
    return " ".join(text.split("Developer debug context")[0].split())


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What `torch.compile` makes of `model(*args, **kwargs)`: its graphs, and where and why it breaks. The call runs in PyTorch."""
    graphs: list[int] = []
    breaks: list[GraphBreak] = []

    def look(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(sum(node.op.startswith("call") for node in graph_module.graph.nodes))
        if (found := break_of(graph_module)) is not None:
            breaks.append(found)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=look)(*args, **kwargs)
    torch._dynamo.reset()
    return Explanation(tuple(graphs), tuple(dict.fromkeys(breaks)))
