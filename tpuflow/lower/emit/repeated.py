"""A cache of emitted kernels: a node that is structurally equal to an earlier one gets its kernels, on other buffers and source lines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuflow.isa.program import Kernel
from tpuflow.lower.emit.site import Emitted
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.passes.analysis import attr_key
from tpuflow.lower.passes.forms import form_of


@dataclass(frozen=True, slots=True)
class Bindings:
    """The buffers and source lines of a node, in order of appearance: what its kernels have besides its structure."""

    buffers: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(slots=True)
class Repeated:
    """The cache: kernels emitted so far, by a structural key of everything but buffers and source lines."""

    made: dict[Hashable, tuple[Emitted, Bindings]] = field(default_factory=dict)

    def emitted(self, node: Node, buffers: Sequence[int], shared: Mapping[int, int], fill: Any, emit: Callable[[], Emitted]) -> Emitted:
        """The kernels of a node: from the cache if a structurally equal node was emitted before, else from `emit`.

        Nodes are structurally equal if they (with all nodes of their regions) do the same to values of the same types, use `buffers` and
        source lines in the same pattern of repetitions, those that may become one (`shared`) included, and pad with the same number `fill`.
        """
        sources = [n.source for n in (node, *(n for region in node.regions for n in region.walk()))]
        own = Bindings(tuple(dict.fromkeys(buffers)), tuple(dict.fromkeys(sources)))
        form = (form_of(node), _pattern(buffers), _pattern([shared.get(b, b) for b in buffers]), _pattern(sources), attr_key(fill))
        known = self.made.get(form)
        if known is None:
            self.made[form] = emitted, _ = emit(), own
            return emitted
        made, other = known
        place = dict(zip(other.buffers, own.buffers, strict=True))
        line = {"": ""} | dict(zip(other.sources, own.sources, strict=True))  # waits in a section of nothing else are of no line
        return replace(made, kernels=tuple(_moved(k, node.scope, place, line) for k in made.kernels))


def _pattern(items: Sequence[Hashable]) -> tuple[int, ...]:
    """The pattern of repetitions: each item replaced by the number of distinct items before its first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(item, len(numbers)) for item in items])


def _moved(kernel: Kernel, scope: str, place: Mapping[int, int], line: Mapping[str, str]) -> Kernel:
    """The kernel on other buffers, for a node of another scope."""
    return replace(kernel.on(place), scope=scope, sources=tuple([line[s] for s in kernel.sources]))
