"""Stages of a compilation compared tensor by tensor: the first that one computes otherwise than the stage before it, and where it is.

Every stage is computed by the graph's oracle, in the device's own arithmetic, and the Program by the device, in it too. No pass changes a
bit of an output, nor the value of a tensor that it keeps, so what differs is a fault of the compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tpuflow.chips import Chip
from tpuflow.compiler import compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.errors import CompileError
from tpuflow.isa.program import Program
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.interpret import interpret

DEVICE = "device"
"""The name of the last stage: the Program as it runs."""

Array = np.ndarray
Stage = tuple[str, Graph]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that stage `after` computes otherwise than stage `before`.

    `tensor` is its type, `output` its name if it is an output, `op` what makes it, `scope` and `source` its place in the model and the
    user's line, where known. `elements` of it differ, by `largest` at most (nan where one is not a number).
    """

    before: str
    after: str
    tensor: str
    output: str
    op: str
    scope: str
    source: str
    elements: int
    largest: float

    def __str__(self) -> str:
        named = f"{self.tensor} {self.output!r}" if self.output else self.tensor
        place = ", ".join(filter(None, (self.source, f"[{self.scope}]" if self.scope else ""))) or "a place that is not known"
        return (
            f"{named} of {self.op!r} at {place} is the first that {self.after} computes otherwise than {self.before}: "
            f"{self.elements} elements differ, by {self.largest:g} at most"
        )


def first_difference(stages: Sequence[Stage], program: Program, chip: Chip, arrays: Sequence[Array]) -> Difference | None:
    """The first tensor that differs between two stages in a row, the device being the last; None if all bits are the same.

    stages: names and graphs, as `tpuflow.lower.stage_log.Watch` is told them. program: what became of the last. arrays: one for each input.
    A loop's tensors are compared in its first trip, and its results.
    """
    before = _Trace.of(stages[0][1], arrays)
    for (name, graph), (next_name, next_graph) in pairwise(stages):
        after = _Trace.of(next_graph, arrays)
        if found := _between(name, graph, before, next_name, next_graph, after, arrays):
            return found
        before = after
    return _on_device(*stages[-1], program, chip, arrays, before)


@dataclass(frozen=True, slots=True)
class _Trace:
    """A digest of every tensor's bits, in the order in which they are made, and the outputs."""

    digests: dict[Value, bytes]
    makers: dict[Value, Node]
    outputs: tuple[Array, ...]

    @classmethod
    def of(cls, graph: Graph, arrays: Sequence[Array]) -> _Trace:
        digests: dict[Value, bytes] = {}
        makers: dict[Value, Node] = {}

        def observe(node: Node, results: Sequence[Array]) -> None:
            for value, array in zip(node.results, results, strict=True):
                if value not in digests:
                    digests[value], makers[value] = _digest(_signless(array)), node

        return cls(digests, makers, interpret(graph, *arrays, observe=observe))


def _between(
    name: str, graph: Graph, before: _Trace, next_name: str, next_graph: Graph, after: _Trace, arrays: Sequence[Array]
) -> Difference | None:
    for value, digest in after.digests.items():
        if before.digests.get(value, digest) != digest:
            old, new = _array_of(graph, value, arrays), _array_of(next_graph, value, arrays)
            return _difference(name, next_name, after.makers[value], value, old, new, _output_name(next_graph, value))
    for i, old, new in _unequal(before.outputs, after.outputs):
        value = next_graph.outputs[i]
        return _difference(name, next_name, after.makers.get(value), value, old, new, _output_name(next_graph, value))
    return None


def _on_device(name: str, graph: Graph, program: Program, chip: Chip, arrays: Sequence[Array], trace: _Trace) -> Difference | None:
    found = _run(program, arrays)
    wrong = next(_unequal(trace.outputs, found), None)
    if wrong is None:
        return None
    return _at_kernel(name, graph, chip, arrays) or _of_output(name, graph, trace, *wrong)


def _at_kernel(name: str, graph: Graph, chip: Chip, arrays: Sequence[Array]) -> Difference | None:
    """The first kernel that is wrong, found by a Program that keeps what every kernel makes; None if that one is right or too large."""
    made = [(node, value) for node in graph.nodes for value in node.results]
    all_kept = replace(graph, outputs=tuple(value for _, value in made), output_names=())
    try:
        found = _run(compile_graph(all_kept, chip=chip, passes=()), arrays)
    except CompileError:
        return None
    for i, old, new in _unequal(interpret(all_kept, *arrays), found):
        node, value = made[i]
        return _difference(name, DEVICE, node, value, old, new, _output_name(graph, value))
    return None


def _of_output(name: str, graph: Graph, trace: _Trace, i: int, old: Array, new: Array) -> Difference:
    value = graph.outputs[i]
    return _difference(name, DEVICE, trace.makers.get(value), value, old, new, _output_name(graph, value))


def _run(program: Program, arrays: Sequence[Array]) -> tuple[Array, ...]:
    outputs, _ = Executable(program, fidelity="bitexact").launch([np.array(array) for array in arrays])
    return tuple(np.asarray(output) for output in outputs)


def _array_of(graph: Graph, wanted: Value, arrays: Sequence[Array]) -> Array:
    """What a value is when it is made first."""
    found: list[Array] = []

    def observe(node: Node, results: Sequence[Array]) -> None:
        if not found and wanted in node.results:
            found.append(results[node.results.index(wanted)])

    interpret(graph, *arrays, observe=observe)
    return found[0]


def _unequal(before: Sequence[Array], after: Sequence[Array]) -> Iterator[tuple[int, Array, Array]]:
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if _digest(old) != _digest(new):
            yield i, old, new


def _signless(array: Any) -> Array:
    """The array with every zero positive: on its way to an output a pass may change the sign of a zero that no output sees."""
    array = np.asarray(array)
    return array if array.dtype.kind in "biu" else array + array.dtype.type(0)


def _digest(array: Any) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _difference(before: str, after: str, node: Node | None, value: Value, old: Array, new: Array, output: str) -> Difference:
    bits = np.dtype(f"u{old.dtype.itemsize}")
    unequal = np.ascontiguousarray(old).view(bits) != np.ascontiguousarray(new).view(bits)
    with np.errstate(all="ignore"):
        largest = np.max(np.abs(old.astype(np.float64) - new.astype(np.float64)), initial=0.0)
    op, scope, source = ("input", "", "") if node is None else (node.op, node.scope, node.source)
    return Difference(before, after, str(value.type), output, op, scope, source, int(unequal.sum()), float(largest))


def _output_name(graph: Graph, value: Value) -> str:
    return next((name for output, name in zip(graph.outputs, graph.output_names, strict=False) if output is value), "")
