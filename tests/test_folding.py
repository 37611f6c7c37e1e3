"""One arithmetic: folding at compile time, the graph's oracle and both engines give the same bits for every elementwise operation."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tpuflow.compiler import compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import COMPUTED, DTYPES, PRED, DType
from tpuflow.errors import GraphError
from tpuflow.isa.elementwise import BINARY, COMPARE, UNARY
from tpuflow.isa.numpy_rounding import splat
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.elementwise import fold_splats
from tpuflow.lower.graph.graph import Graph, TensorType
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.ops import ELEMENTWISE, infer
from tpuflow.lower.passes.simplify import Simplify

pytestmark = pytest.mark.optimised

FLOATS = (0.0, 1.0, 0.5, 1.5, 3.0, 7.25, 1e-3, 6e4, math.inf, 5.9e-39, 1e-40, 2.0**-126, 2.0**-149, 2.0**-14, 6e-8, 3e38)


def _values(dtype: DType) -> list[bool | int | float]:
    """Ordinary numbers and the edges of a type: subnormals, the largest, infinities, NaN, zeros of both signs, integer extremes."""
    if dtype == PRED:
        return [False, True]
    if dtype.is_float:
        return [sign * x for sign in (1.0, -1.0) for x in FLOATS] + [math.nan]
    limits = np.iinfo(dtype.numpy)
    near = [0, 1, 2, 3, 7, 8, 31, 32, 33, 100, -1, -2, -7, limits.min, limits.min + 1, limits.max - 1, limits.max]
    return sorted({x for x in near if limits.min <= x <= limits.max})


Work = tuple[str, dict[str, Any], int, tuple[TensorType, ...]]
"""An operation: its name, attributes, number of operands, and the result type that it must be told."""


def _works(dtype: DType) -> Iterator[Work]:
    """Every elementwise operation with operands of a type, `select` apart."""
    found: list[tuple[str, Mapping[str, Any], int, DType | None]] = [(op, {}, 1, None) for op in (*UNARY, "is_finite")]
    found += [(op, {}, 2, None) for op in BINARY] + [("compare", {"direction": d}, 2, None) for d in COMPARE]
    found += [(op, {}, 1, to) for op in ("convert", "bitcast") for to in DTYPES]
    for op, attrs, arity, to in found:
        asked = () if to is None else (TensorType(to),)
        try:
            infer(op, (TensorType(dtype),) * arity, attrs, (), asked)
        except GraphError:
            continue
        yield op, dict(attrs), arity, asked


@functools.cache
def _graph(dtype: DType) -> tuple[Graph, tuple[Work, ...], tuple[np.ndarray, np.ndarray]]:
    """All operations on every pair of values, as one graph; the pairs."""
    values = [splat(x, dtype) for x in _values(dtype)]
    pairs = tuple(np.array(side, dtype.numpy) for side in zip(*itertools.product(values, values), strict=True))
    type, works = TensorType(dtype, pairs[0].shape), tuple(_works(dtype))
    b = Builder("all", [type, type])
    made = [b.emit(op, b.inputs[:n], attrs, [TensorType(t.dtype, type.shape) for t in asked]).result for op, attrs, n, asked in works]
    made.append(b.select(b.eq(b.inputs[0], b.inputs[0]) if dtype != PRED else b.inputs[0], *b.inputs))
    return b.finish(made), works, (pairs[0], pairs[1])


def _names(works: tuple[Work, ...]) -> list[str]:
    return [" ".join(map(str, (op, *attrs.values(), *asked))) for op, attrs, _, asked in works] + ["select"]


def test_every_elementwise_operation_is_tried_on_some_type() -> None:
    assert {op for dtype in COMPUTED for op, *_ in _works(dtype)} | {"select"} == set(ELEMENTWISE)


def _is_own_nan(x: np.ndarray, dtype: DType) -> bool:
    """Whether x is a NaN with bits other than the canonical one's: no number says it."""
    return dtype.computed.is_float and bool(np.isnan(x)) and x.tobytes() != splat(math.nan, dtype).tobytes()


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_what_is_folded_is_what_the_oracle_computes(dtype: DType) -> None:
    graph, works, pairs = _graph(dtype)
    count, wrong = len(_values(dtype)), []
    for (op, attrs, arity, _), output, found in zip(works, graph.outputs, interpret(graph, *pairs), strict=False):
        for i in range(0, len(found), count if arity == 1 else 1):
            value = fold_splats(op, attrs, [pairs[n][i].item() for n in range(arity)], [dtype] * arity, output.dtype)
            own = _is_own_nan(found[i], output.dtype)
            if own != (value is None) or (value is not None and splat(value, output.dtype).tobytes() != found[i].tobytes()):
                wrong.append((op, attrs, pairs[0][i], pairs[1][i], value, found[i]))
    assert not wrong


@pytest.mark.parametrize("engine", ["reference", pytest.param("fast", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_the_oracle_computes_what_the_device_does(dtype: DType, engine: str) -> None:
    graph, works, pairs = _graph(dtype)
    found, _ = Executable(compile_graph(graph), engine=engine, fidelity="bitexact").launch(pairs)
    for name, x, y in zip(_names(works), interpret(graph, *pairs), map(np.asarray, found), strict=True):
        differ = np.flatnonzero(x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")) if x.tobytes() != y.tobytes() else []
        assert not len(differ), (name, [(pairs[0][i], pairs[1][i], x[i], y[i]) for i in differ[:5]])


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_the_folding_of_passes_is_the_same(dtype: DType) -> None:
    values = [splat(x, dtype).item() for x in _values(dtype)]
    partners = [values[(7 * k + 3) % len(values)] for k in range(len(values))]
    b, wanted = Builder("splats"), []
    for (op, attrs, arity, asked), *pair in ((work, x, y) for work in _works(dtype) for x, y in zip(values, partners, strict=True)):
        made = b.emit(op, [b.full(TensorType(dtype), x) for x in pair[:arity]], attrs, asked).result
        wanted.append((made, fold_splats(op, attrs, pair[:arity], [dtype] * arity, made.dtype)))
    folded = Simplify()(b.finish([made for made, _ in wanted]))
    number = {node.result: node.attrs["value"] for node in folded.nodes if node.op == "full"}
    for value, (made, known) in zip(folded.outputs, wanted, strict=True):
        assert (value in number) == (known is not None)
        assert known is None or splat(number[value], made.dtype).tobytes() == splat(known, made.dtype).tobytes()
