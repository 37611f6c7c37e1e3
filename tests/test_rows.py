"""FuseRows: softmax, layer normalisation and their gradients as one kernel each: which are, what it saves, and that every engine agrees."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graphs import kinds
from tests.test_sums_in_products import SMALL
from tests.test_traffic_passes import T, assert_same_bits, fused, microseconds
from tests.tolerances import LAYER_STATISTICS
from tpuflow.chips import get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F16, F32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.passes.fuse_rows import FuseRows


def softmax(rows: int, columns: int, *, axis: int = 1) -> Graph:
    b = Builder("softmax", [T(F16, rows, columns)])
    x = b.convert(b.inputs[0], F32)
    kept = (1 - axis,)
    e = b.exp(b.sub(x, b.broadcast(b.reduce("max", x, (axis,)), x.shape, kept)))
    return fused(b, [b.convert(b.div(e, b.broadcast(b.reduce("add", e, (axis,)), x.shape, kept)), F16)])


def test_a_softmax_reads_its_rows_once() -> None:
    graph = softmax(65536, 512)
    one = verify(FuseRows()(graph))
    assert (kinds(graph), kinds(one)) == (["reduce", "reduce", "map"], ["rows"])
    assert [str(v.type) for v in (*one.nodes[0].inputs, *one.nodes[0].results)] == ["f16[65536,512]"] * 2
    assert_same_bits(softmax(640, 512), FuseRows()(softmax(640, 512)))
    assert microseconds(graph, FuseRows()) < 0.6 * microseconds(graph)


def test_columns_and_rows_that_are_too_long_for_the_chip_stay_as_they_are() -> None:
    columns, rows = softmax(65536, 512, axis=0), softmax(8, 2048)
    assert kinds(FuseRows()(columns)) == kinds(columns)
    memory = {chip: kinds(FuseRows().on(replace(get_chip("generic"), vmem_bytes=chip * 1024))(rows)) for chip in (64, 16384)}
    assert memory == {64: kinds(rows), 16384: ["rows"]}


def test_what_is_read_elsewhere_is_stored_all_the_same() -> None:
    b = Builder("f", [T(F32, 4096, 512)])
    (x,) = b.inputs
    total = b.reduce("add", x, (1,))
    y = b.sub(x, b.broadcast(total, x.shape, (0,)))
    graph = FuseRows()(fused(b, [b.exp(y), total, b.dot(y, y, (0,), (0,))]))
    (rows,) = (n for n in graph.nodes if n.op == "fused" and n.attrs["kind"] == "rows")
    assert sorted(str(v.type) for v in rows.results) == ["f32[4096,512]", "f32[4096,512]", "f32[4096]"]


def attention(x: jax.Array, scale: jax.Array, dy: jax.Array) -> tuple:
    """A layer normalisation and an attention without heads [rows, columns]: values and gradients."""

    def forward(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = x.mean(1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(1, keepdims=True) + 1e-5) * scale
        return jax.nn.softmax(y @ y.T) @ y

    y, back = jax.vjp(forward, x, scale)
    return y, *back(dy)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [get_chip("generic"), SMALL], ids=lambda c: c.name)
def test_rows_that_stay_on_the_chip_are_what_jax_computes_on_every_engine(chip) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((70, 33), (33,), (70, 33))]
    program = compile_function(attention, arrays, chip=chip)
    assert sum(kernel.name.startswith("rows") for kernel in program.kernels()) >= 3
    reference = Executable(program, engine="reference").launch(arrays)[0]
    exact, native = (Executable(program, fidelity=fidelity).launch(arrays)[0] for fidelity in ("bitexact", "native"))
    for want, found in zip(reference, exact, strict=True):
        assert np.asarray(want).tobytes() == np.asarray(found).tobytes()
    for want, found in zip(jax.jit(attention)(*arrays), native, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=LAYER_STATISTICS * max(1.0, float(np.abs(want).max())))
