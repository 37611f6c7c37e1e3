"""The form of a node: its structure, but for which values it is on, source lines and scope. Layers are alike, so most nodes of a large
graph share a form with others, and what follows from it is found out once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.analysis import attr_key

P = ParamSpec("P")
T = TypeVar("T")


class Form:
    """One object for all nodes of a form, while there are any. `known`: what is known of them, by function and further arguments."""

    __slots__ = ("__weakref__", "known")

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}


_FORMS: WeakValueDictionary[Hashable, Form] = WeakValueDictionary()
_FORM_OF: WeakKeyDictionary[Node, Form] = WeakKeyDictionary()


def form_of(node: Node) -> Form:
    """The form of a node: the same object for nodes that do the same operations on operands of the same types, whichever values these are,
    with the same tilings."""
    found = _FORM_OF.get(node)
    if found is None:
        found = _FORM_OF[node] = _FORMS.setdefault(_node_key(node, {}), Form())
    return found


def by_form(function: Callable[Concatenate[Node, P], T]) -> Callable[Concatenate[Node, P], T]:
    """A function of a node, and of arguments that can be hashed, called once for each form. What it returns has no values of the node."""

    @functools.wraps(function)
    def known_by_form(node: Node, *args: P.args, **kwargs: P.kwargs) -> T:
        known, key = form_of(node).known, (function, args, tuple(kwargs.items()))
        if key not in known:
            known[key] = function(node, *args, **kwargs)
        return known[key]

    return known_by_form


def _node_key(node: Node, numbers: dict[Value, int]) -> Hashable:
    """A key that is equal for nodes of one form."""
    inputs = tuple([numbers.setdefault(v, len(numbers)) for v in node.inputs])
    results = tuple([numbers.setdefault(v, len(numbers)) for v in node.results])
    types = tuple([v.type for v in (*node.inputs, *node.results)])
    attrs = tuple([(name, attr_key(value)) for name, value in node.attrs.items()])
    return node.op, inputs, results, types, attrs, tuple([_region_key(r) for r in node.regions]), node.tilings


def _region_key(region: Graph) -> Hashable:
    numbers = {v: i for i, v in enumerate(region.inputs)}
    nodes = tuple([_node_key(n, numbers) for n in region.nodes])
    return len(region.inputs), nodes, tuple([numbers[v] for v in region.outputs])
