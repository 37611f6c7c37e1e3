"""Small graphs for every template of emission, and a naive plan that makes a Program of one: a buffer for every value, no reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuflow.chips import CHIPS, Chip
from tpuflow.dtypes import BF16, F16, F32, PRED, S8, S32, U8, U32, DType
from tpuflow.isa.program import Buffer, Constant, Kernel, Port, Program
from tpuflow.lower.emit import emit_node, overwritable
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.graph.kinds import Kind

GENERIC = CHIPS["generic"]
SMALL = replace(
    GENERIC, name="small", vector_sublanes=4, vector_lanes=8, matrix_rows=8, matrix_columns=8, vmem_bytes=6144, acc_bytes=2048,
    smem_bytes=1024,
)  # fmt: skip

ROOMY = replace(SMALL, name="roomy", vmem_bytes=64 * 1024)  # for what adds up longer blocks than fit on the small one

Build = Callable[..., Value | Sequence[Value]]


@dataclass(frozen=True)
class Case:
    """A graph on inputs of the given types; integers are drawn from [low, high). `small`: a chip on which not much of it fits."""

    name: str
    build: Build
    types: tuple[TensorType, ...]
    low: int = -4
    high: int = 4
    small: Chip = SMALL

    def graph(self) -> Graph:
        b = Builder(self.name, self.types)
        made = self.build(b, *b.inputs)
        return b.finish([made] if isinstance(made, Value) else list(made))

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [_array(rng, t, self.low, self.high) for t in self.types]


def _array(rng: np.random.Generator, t: TensorType, low: int, high: int) -> np.ndarray:
    if t.dtype.is_float:
        return np.asarray(rng.standard_normal(t.shape)).astype(t.dtype.numpy)
    if t.dtype == PRED:
        return np.asarray(rng.random(t.shape) < 0.5)
    return np.asarray(rng.integers(0 if t.dtype.kind == "uint" else low, high, t.shape)).astype(t.dtype.numpy)


def t(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape)


@dataclass
class Plan:
    """Buffers of a Program in the making."""

    buffers: list[Buffer]
    index: dict[Value, int]
    top: int = 0

    def buffer(self, value: Value) -> int:
        if value not in self.index:
            made = Buffer(value.dtype, value.shape, self.top)
            self.top += -(-max(made.bytes, 4) // 64) * 64
            self.index[value] = len(self.buffers)
            self.buffers.append(made)
        return self.index[value]


def assemble(graph: Graph, chip: Chip, *, in_place: bool = False) -> Program:
    """A Program of the graph. `in_place` donates all inputs and lets every node that may overwrite an operand's dead buffer do so."""
    plan = Plan([], {})
    for value in graph.inputs:
        plan.buffer(value)
    constants, kernels = [], []
    splats = {n.result: n.attrs["value"] for n in graph.nodes if n.op == "full"}
    for number, node in enumerate(graph.nodes):
        if in_place:
            _share(graph, number, plan)
        for value in node.results:
            plan.buffer(value)
        if node.op == "constant":
            constants.append(Constant(plan.index[node.result], node.attrs["data"].tobytes()))
        kernels += emit_node(node, plan.index.__getitem__, plan.buffers, chip, splats.get).kernels
    inputs = tuple(Port(f"in{i}", v.dtype, v.shape, plan.index[v], donated=in_place) for i, v in enumerate(graph.inputs))
    outputs = tuple(Port(f"out{i}", v.dtype, v.shape, plan.index[v]) for i, v in enumerate(graph.outputs))
    return Program(chip, tuple(plan.buffers), tuple(constants), inputs, outputs, (), (), tuple(kernels), name=graph.name)


def _share(graph: Graph, number: int, plan: Plan) -> None:
    """Give results of a node the buffers of operands that die here, where emission allows it."""
    node = graph.nodes[number]
    later = {v for n in graph.nodes[number + 1 :] for v in n.inputs} | set(graph.outputs)
    taken: set[int] = set()
    for value in node.inputs:
        where = plan.index[value]
        if value in later or where in taken or value not in overwritable(node):
            continue
        result = next((r for r in node.results if r.type == value.type and r not in plan.index), None)
        if result is not None:
            plan.index[result] = where
            taken.add(where)


def kernels_of(case: Case, chip: Chip = GENERIC) -> list[Kernel]:
    return list(assemble(case.graph(), chip).kernels())


# --- cases ------------------------------------------------------------------------------------------------------------


def fuse(kind: str, region: Build) -> Build:
    """A builder of one fused node whose region is built by `region` on inputs of the same types."""

    def build(b: Builder, *inputs: Value) -> Sequence[Value]:
        inner = b.region("region", [v.type for v in inputs])
        made = region(inner, *inner.inputs)
        return b.fused(Kind(kind), inner.finish([made] if isinstance(made, Value) else list(made)), inputs)

    return build


def _adam(b: Builder, p: Value, m: Value, g: Value, lr: Value) -> Sequence[Value]:
    m2 = b.add(b.mul(m, 0.9), b.mul(g, 0.1))
    rate = b.broadcast(lr, p.shape, ())
    return b.sub(p, b.mul(rate, m2)), m2


def _bias_relu(b: Builder, x: Value, bias: Value) -> Value:
    return b.max(b.add(x, b.broadcast(bias, x.shape, (len(x.shape) - 1,))), 0.0)


def _stretched(b: Builder, x: Value, rows: Value, scale: Value) -> Value:
    wide = b.broadcast(rows, x.shape, (0, 1))
    return b.mul(b.add(x, wide), b.broadcast(scale, x.shape, ()))


def _causal(b: Builder, x: Value) -> Value:
    row, column = (b.iota(TensorType(S32, x.shape), axis) for axis in (1, 2))
    return b.select(b.ge(row, column), x, b.full_like(x, -1.0))


def _dropped(b: Builder, x: Value, state: Value) -> Value:
    return b.select(b.lt(b.random(state, x.shape), 0xC0000000), x, b.full_like(x, 0.0))


def _dropped_columns(b: Builder, x: Value, rows: Value, state: Value) -> Value:
    return _dropped(b, b.add(x, b.broadcast(rows, x.shape, (0,))), state)


def _moments(b: Builder, x: Value) -> Sequence[Value]:
    total, square = b.reduce("add", x, (0,)), b.reduce("add", b.mul(x, x), (0,))
    return b.mul(total, 0.5), b.add(square, total)


def _masked_sum(b: Builder, x: Value, mask: Value, start: Value) -> Value:
    kept = b.select(b.broadcast(mask, x.shape, (0,)), x, b.full_like(x, 0.0))
    return b.add(b.reduce("add", b.exp(kept), (1,)), start)


def _masked_and_summed(b: Builder, x: Value, mask: Value, y: Value) -> Sequence[Value]:
    """What a mask leaves of x, stored, and two sums of it over the first axis."""
    kept = b.select(mask, x, b.full_like(x, 0.0))
    total, other = b.reduce("add", kept, (0,)), b.reduce("add", b.mul(kept, y), (0,))
    return b.mul(total, 0.5), kept, b.add(other, total)


def _softmax(b: Builder, x: Value) -> Value:
    wide, rows = b.convert(x, F32), tuple(range(len(x.shape) - 1))
    last = (len(x.shape) - 1,)
    e = b.exp(b.sub(wide, b.broadcast(b.reduce("max", wide, last), x.shape, rows)))
    return b.convert(b.div(e, b.broadcast(b.reduce("add", e, last), x.shape, rows)), x.dtype)


def _layer_norm(b: Builder, x: Value, scale: Value, old: Value) -> Sequence[Value]:
    """[B, H, W] over [H, W] -> the normalised rows, their means, and twice the deviation of every row less one of before."""
    size = float(x.shape[1] * x.shape[2])
    mean = b.div(b.reduce("add", x, (1, 2)), size)
    distance = b.sub(x, b.broadcast(mean, x.shape, (0,)))
    deviation = b.sqrt(b.add(b.div(b.reduce("add", b.mul(distance, distance), (1, 2)), size), 1.0))
    made = b.mul(b.div(distance, b.broadcast(deviation, x.shape, (0,))), b.broadcast(scale, x.shape, (1, 2)))
    return made, mean, b.sub(b.add(deviation, deviation), old)


def _dense(b: Builder, x: Value, w: Value, bias: Value) -> Value:
    y = b.dot(x, w, (1,), (0,))
    return b.convert(b.max(b.add(y, b.broadcast(b.convert(bias, F32) if bias.dtype != F32 else bias, y.shape, (1,))), 0.0), x.dtype)


def _normalised(b: Builder, x: Value, w: Value, near: Value, old: Value) -> Sequence[Value]:
    """A product in f16, and the first two moments of its columns, taken from differences from `near`, with those of before."""
    y = b.convert(b.dot(x, w, (1,), (0,)), F16)
    distance = b.sub(b.convert(y, F32), b.broadcast(near, y.shape, (1,)))
    total, square = b.reduce("add", distance, (0,)), b.reduce("add", b.mul(distance, distance), (0,))
    return y, b.add(near, b.mul(total, 0.5)), b.max(b.mul(square, old), 0.25)


def _batches_summed(b: Builder, x: Value, w: Value, mask: Value) -> Sequence[Value]:
    y = b.dot(x, w, (2,), (0,))
    return b.neg(y), b.reduce("max", b.select(mask, y, b.full_like(y, -1.0)), (0, 1))


def _sgd(b: Builder, x: Value, g: Value, w: Value, lr: Value) -> Value:
    gradient = b.dot(x, g, (0,), (0,))
    return b.sub(w, b.mul(gradient, b.broadcast(lr, w.shape, ())))


def _half_dot(b: Builder, x: Value, w: Value) -> Value:
    return b.convert(b.dot(b.convert(x, F16), b.convert(w, F16), (1,), (0,)), F16)


def dot(lhs_contract: tuple, rhs_contract: tuple, lhs_batch: tuple = (), rhs_batch: tuple = ()) -> Build:
    return lambda b, x, y: b.dot(x, y, lhs_contract, rhs_contract, lhs_batch, rhs_batch)


def _update(b: Builder, x: Value, u: Value, *starts: Value) -> Value:
    return b.dynamic_update_slice(x, u, starts)


def _rows(b: Builder, x: Value, data: Sequence[int]) -> Value:
    return b.constant(np.asarray(data, np.int32))


def _scatter(mode: str, index: Sequence[int]) -> Build:
    return lambda b, x, u: b.scatter_rows(x, _rows(b, x, index), u, mode)


MAPS = (
    Case("add", lambda b, x, y: b.add(x, y), (t(F32, 33, 70), t(F32, 33, 70))),
    Case("add_rank5_f16", lambda b, x, y: b.mul(x, y), (t(F16, 2, 3, 1, 5, 7), t(F16, 2, 3, 1, 5, 7))),
    Case("square_of_one_operand", lambda b, x: b.mul(x, x), (t(BF16, 41),)),
    Case("integers", lambda b, x, y: b.xor(b.add(x, y), x), (t(S32, 5, 100), t(S32, 5, 100))),
    Case("bytes", lambda b, x: b.add(x, x), (t(U8, 300),)),
    Case("compare_select", lambda b, x, y: b.select(b.lt(x, y), y, x), (t(F32, 9, 9), t(F32, 9, 9))),
    Case("is_finite", lambda b, x: b.is_finite(b.div(x, b.full_like(x, 0.0))), (t(F32, 50),)),
    Case("bitcast_convert", lambda b, x: b.convert(b.bitcast(x, U32), F32), (t(F32, 3, 50),)),
    Case("full", lambda b: b.full(t(F16, 7, 300), 1.5), ()),
    Case("iota", lambda b: (b.iota(t(S32, 5, 40, 3), 1), b.iota(t(F32, 4, 1), 1)), ()),
    Case("random", lambda b, s: (b.random(s, (5, 40, 3)), b.random(s, (2, 1))), (t(U32, 4),), 0, 1 << 31),
    Case("random_one", lambda b, s: b.random(s, (1,)), (t(U32, 4),)),
    Case("broadcast_minor", lambda b, x: b.broadcast(x, (40, 30), (1,)), (t(F32, 30),)),
    Case("broadcast_stretch", lambda b, x: b.broadcast(x, (4, 6, 5, 30), (1, 2, 3)), (t(PRED, 6, 1, 30),)),
    Case("broadcast_scalar", lambda b, x: b.broadcast(x, (4, 600), ()), (t(F32),)),
    Case("broadcast_scalar_to_one", lambda b, x: b.broadcast(x, (1, 1), ()), (t(F32),)),
    Case("scalar", lambda b, x, y: b.add(b.mul(x, y), 2.0), (t(F32), t(F32))),
    Case("one_element", fuse("map", lambda b, x, y: b.add(x, b.broadcast(y, (1, 1), ()))), (t(F32, 1, 1), t(F32))),
    Case("fused_adam", fuse("map", _adam), (t(F32, 13, 57), t(F32, 13, 57), t(F32, 13, 57), t(F32))),
    Case("fused_scalar", fuse("map", _adam), (t(F32), t(F32), t(F32), t(F32))),
    Case("fused_bias_relu", fuse("map", _bias_relu), (t(F32, 6, 7, 45), t(F32, 45))),
    Case("fused_stretched", fuse("map", _stretched), (t(F32, 20, 36), t(F32, 20, 1), t(F32))),
    Case("fused_iota", fuse("map", _causal), (t(F32, 3, 17, 19),)),
    Case("fused_random", fuse("map", _dropped), (t(F32, 7, 9, 45), t(U32, 4)), 0, 1 << 31),
    Case("fused_random_of_two_axes", fuse("map", _dropped_columns), (t(F32, 45, 70), t(F32, 45), t(U32, 4)), 0, 1 << 31),
    Case("fused_same_input_twice", fuse("map", lambda b, x, r: (b.add(x, b.broadcast(r, x.shape, (1,))), x)), (t(F32, 30, 30), t(F32, 30))),
    Case("wide", lambda b, x: b.neg(x), (t(F32, 3, 5000),)),
)  # fmt: skip

REDUCES = (
    Case("sum_rows", lambda b, x: b.reduce("add", x, (1,)), (t(F32, 33, 700),), small=ROOMY),
    Case("sum_columns_f16", lambda b, x: b.reduce("add", x, (0,)), (t(F16, 130, 33),)),
    Case("max_all", lambda b, x: b.reduce("max", x, (0, 1, 2)), (t(F32, 3, 40, 11),)),
    Case("min_inner_and_outer_s32", lambda b, x: b.reduce("min", x, (0, 2)), (t(S32, 6, 7, 50),)),
    Case("product_bf16", lambda b, x: b.reduce("mul", x, (1,)), (t(BF16, 5, 9),)),
    Case("any", lambda b, x: b.reduce("or", x, (1,)), (t(PRED, 40, 90),)),
    Case("all", lambda b, x: b.reduce("and", x, (0, 1)), (t(PRED, 4, 9),)),
    Case("xor_u32", lambda b, x: b.reduce("xor", x, (0,)), (t(U32, 100),), 0, 1000),
    Case("and_u32", lambda b, x: b.reduce("and", x, (0,)), (t(U32, 100, 2),), 0, 1000),
    Case("axis_of_one", lambda b, x: b.reduce("add", x, (1,)), (t(F32, 40, 1, 3),)),
    Case("one_of_one", lambda b, x: b.reduce("add", x, (0,)), (t(F32, 1),)),
    Case("middle", lambda b, x: b.reduce("add", x, (1, 3)), (t(F32, 3, 20, 5, 4),)),
    Case("fused_moments", fuse("reduce", _moments), (t(F32, 130, 33),)),
    Case("fused_masked_and_summed", fuse("reduce", _masked_and_summed), (t(F32, 130, 33), t(PRED, 130, 33), t(F32, 130, 33)), small=ROOMY),
    Case("masked_and_summed_one_row", fuse("reduce", _masked_and_summed), (t(F32, 1, 33), t(PRED, 1, 33), t(F32, 1, 33))),
    Case("fused_masked_sum", fuse("reduce", _masked_sum), (t(F32, 30, 130), t(PRED, 30), t(F32, 30)), small=ROOMY),
    Case("fused_reduce_and_scale",
         fuse("reduce", lambda b, x, s: b.mul(b.reduce("add", b.mul(x, x), (0, 1)), s)), (t(F32, 300, 130), t(F32)), small=ROOMY),
)  # fmt: skip

ROWS = (
    Case("fused_softmax", fuse("rows", _softmax), (t(F32, 5, 30, 9),)),
    Case("fused_softmax_f16", fuse("rows", _softmax), (t(F16, 5, 30, 9),)),
    Case("fused_row_of_two_axes", fuse("rows", _layer_norm), (t(F32, 40, 2, 3), t(F32, 2, 3), t(F32, 40))),
    Case("fused_one_row", fuse("rows", _layer_norm), (t(F32, 1, 2, 3), t(F32, 2, 3), t(F32, 1))),
)

DOTS = (
    Case("matmul", dot((1,), (0,)), (t(F32, 33, 40), t(F32, 40, 50))),
    Case("matmul_f16", dot((1,), (0,)), (t(F16, 33, 40), t(F16, 40, 50))),
    Case("matmul_bf16", dot((1,), (0,)), (t(BF16, 9, 16), t(BF16, 16, 8))),
    Case("matmul_s32", dot((1,), (0,)), (t(S32, 33, 40), t(S32, 40, 5))),
    Case("matmul_s8", dot((1,), (1,)), (t(S8, 12, 20), t(S8, 7, 20))),
    Case("matmul_both_transposed", dot((0,), (1,)), (t(F32, 40, 33), t(F32, 50, 40))),
    Case("deep", dot((1,), (0,)), (t(F32, 3, 2100), t(F32, 2100, 4)), small=ROOMY),
    Case("deep_s8", dot((1,), (0,)), (t(S8, 3, 1100), t(S8, 1100, 40)), small=ROOMY),
    Case("deep_in_two_axes", dot((0, 2), (0, 1)), (t(F16, 5, 3, 300), t(F16, 5, 300, 9)), small=ROOMY),
    Case("batched", dot((2,), (1,), (0,), (0,)), (t(F32, 6, 9, 20), t(F32, 6, 20, 11))),
    Case("attention_scores", dot((3,), (3,), (0, 2), (0, 2)), (t(F32, 2, 9, 3, 8), t(F32, 2, 11, 3, 8))),
    Case("batch_in_the_middle", dot((0,), (2,), (1,), (0,)), (t(F32, 20, 6, 9), t(F32, 6, 11, 20))),
    Case("several_contracted", dot((1, 3), (0, 2)), (t(F32, 4, 5, 6, 7), t(F32, 5, 3, 7))),
    Case("crossed_contracted", dot((1, 2), (1, 0)), (t(F32, 4, 15, 16), t(F32, 16, 15, 3)), small=ROOMY),
    Case("outer", dot((), ()), (t(F32, 30), t(F32, 40))),
    Case("inner", dot((0,), (0,)), (t(F32, 300), t(F32, 300)), small=ROOMY),
    Case("matrix_vector", dot((1,), (0,)), (t(F32, 30, 40), t(F32, 40))),
    Case("vector_matrix", dot((0,), (0,)), (t(F32, 40), t(F32, 40, 30))),
    Case("elementwise_batch", dot((), (), (0,), (0,)), (t(F32, 40), t(F32, 40))),
    Case("scalars", dot((), ()), (t(F32), t(F32))),
    Case("fused_dense", fuse("dot", _dense), (t(F32, 33, 40), t(F32, 40, 50), t(F32, 50))),
    Case("fused_dense_f16", fuse("dot", _dense), (t(F16, 33, 40), t(F16, 40, 50), t(F32, 50))),
    Case("fused_with_sums", fuse("dot", _normalised), (t(F16, 130, 16), t(F16, 16, 33), t(F32, 33), t(F32, 33)), small=ROOMY),
    Case("fused_with_sums_deep", fuse("dot", _normalised), (t(F16, 130, 900), t(F16, 900, 33), t(F32, 33), t(F32, 33)), small=ROOMY),
    Case("fused_with_sums_of_one_row", fuse("dot", _normalised), (t(F16, 1, 16), t(F16, 16, 33), t(F32, 33), t(F32, 33))),
    Case("fused_with_sums_of_one_column", fuse("dot", _normalised), (t(F16, 130, 16), t(F16, 16, 1), t(F32, 1), t(F32, 1))),
    Case("fused_with_greatest", fuse("dot", _batches_summed), (t(F32, 9, 14, 6), t(F32, 6, 20), t(PRED, 9, 14, 20))),
    Case("fused_sgd", fuse("dot", _sgd), (t(F32, 33, 40), t(F32, 33, 50), t(F32, 40, 50), t(F32))),
    Case("fused_half", fuse("dot", _half_dot), (t(F32, 33, 40), t(F32, 40, 20)), small=ROOMY),
    Case("fused_square", fuse("dot", lambda b, x: b.neg(b.dot(x, x, (1,), (1,)))), (t(F32, 23, 40),)),
)

MOVES = (
    Case("transpose", lambda b, x: b.transpose(x, (1, 0)), (t(F32, 33, 70),)),
    Case("transpose4", lambda b, x: b.transpose(x, (0, 2, 3, 1)), (t(F16, 3, 4, 9, 10),)),
    Case("slice", lambda b, x: b.slice(x, (3, 5), (30, 60), (1, 3)), (t(F32, 33, 70),)),
    Case("slice_one", lambda b, x: b.slice(x, (3, 5), (4, 6)), (t(F32, 33, 70),)),
    Case("slice_rows", lambda b, x: b.slice(x, (3, 0, 0), (30, 7, 8)), (t(PRED, 33, 7, 8),)),
    Case("pad", lambda b, x: b.pad(x, 7.0, (1, -2), (3, 4), (0, 2)), (t(F32, 13, 20),)),
    Case("pad_s32", lambda b, x: b.pad(x, -1, (0, 2), (0, 3)), (t(S32, 50, 11),)),
    Case("pad_pred", lambda b, x: b.pad(x, True, (5,), (-3,)), (t(PRED, 50),)),
    Case("pad_dynamic", lambda b, x, v: b.pad(x, v, (1, -2), (-3, 4), (0, 2)), (t(F32, 13, 20), t(F32))),
    Case("concatenate", lambda b, x, y, z: b.concatenate([x, y, z], 1), (t(F32, 9, 5), t(F32, 9, 40), t(F32, 9, 1))),
    Case("concatenate_rows", lambda b, x, y: b.concatenate([x, y], 0), (t(F16, 9, 50), t(F16, 11, 50))),
    Case("stack_scalars", lambda b, x, y: b.concatenate([b.reshape(x, (1,)), b.reshape(y, (1,))], 0), (t(F32), t(F32))),
    Case("reverse", lambda b, x: b.reverse(x, (0, 2)), (t(F32, 7, 20, 9),)),
    Case("reverse_all", lambda b, x: b.reverse(x, (0,)), (t(F32, 2000),)),
    Case("reshape", lambda b, x: b.reshape(x, (7, 60)), (t(F32, 20, 21),)),
    Case("reshape_scalar", lambda b, x: b.reshape(x, (1, 1)), (t(F32),)),
    Case("dynamic_slice", lambda b, x, i, j: b.dynamic_slice(x, (i, j), (12, 30)), (t(F32, 20, 40), t(S32), t(S32)), 0, 8),
    Case("dynamic_row", lambda b, x, i: b.dynamic_slice(x, (i, b.scalar(0, S32)), (1, 40)), (t(F32, 20, 40), t(S32)), 0, 19),
    Case("dynamic_element", lambda b, x, i: b.dynamic_slice(x, (i,), (1,)), (t(F32, 20), t(S32)), 0, 19),
    Case("dynamic_update_slice", _update, (t(F32, 20, 40), t(F32, 12, 30), t(S32), t(S32)), 0, 8),
    Case("dynamic_update_row", _update, (t(F16, 60, 90), t(F16, 1, 90), t(S32), t(S32)), 0, 1),
)

INDEXED = (
    Case("take", lambda b, x: b.take_rows(x, _rows(b, x, [3, 0, 19, 3, 25, -1, 7]), -1.0), (t(F32, 20, 50),)),
    Case("take_deep", lambda b, x, i: b.take_rows(x, i, 0), (t(S32, 20, 5, 6), t(S32, 70)), 0, 22),
    Case("take_elements", lambda b, x, i: b.take_rows(x, i, 9.0), (t(F16, 20), t(S32, 300)), 0, 22),
    Case("take_one", lambda b, x, i: b.take_rows(x, i, 9.0), (t(F32, 20, 3), t(S32, 1)), 0, 20),
    Case("scatter_add", _scatter("add", [3, 0, 19, 3, 25, -1, 7]), (t(F32, 20, 50), t(F32, 7, 50))),
    Case("scatter_set", _scatter("set", [3, 0, 3, 3]), (t(S32, 20, 5, 3), t(S32, 4, 5, 3))),
    Case("scatter_max_many", lambda b, x, i, u: b.scatter_rows(x, i, u, "max"), (t(F32, 20, 9), t(S32, 300), t(F32, 300, 9)), 0, 22),
    Case("take_of_one", lambda b, x, i: b.take_rows(x, i, 9.0), (t(F32, 1), t(S32, 3)), 0, 2),
    Case("scatter_to_one", lambda b, x, i, u: b.scatter_rows(x, i, u, "add"), (t(F32, 1), t(S32, 4), t(F32, 4)), 0, 2),
    Case("scatter_elements", lambda b, x, i, u: b.scatter_rows(x, i, u, "add"), (t(F16, 20), t(S32, 30), t(F16, 30)), 0, 22),
)

SCANS = (
    Case("cumsum_rows", lambda b, x: b.cumulative("add", x, 1), (t(F32, 9, 700),)),
    Case("cumsum_columns", lambda b, x: b.cumulative("add", x, 0), (t(S32, 130, 33),)),
    Case("cumprod_reverse", lambda b, x: b.cumulative("mul", x, 1, reverse=True), (t(F32, 4, 130, 3),)),
    Case("cummax", lambda b, x: b.cumulative("max", x, 0), (t(F16, 900),)),
    Case("cummin_of_one", lambda b, x: b.cumulative("min", x, 1), (t(F32, 9, 1),)),
    Case("sort", lambda b, x: b.sort([x], 1)[0], (t(F32, 40, 60),)),
    Case("sort_by_key", lambda b, x, y: b.sort([x, y], 0), (t(S32, 20, 5), t(F32, 20, 5))),
    Case("sort_middle_two_keys", lambda b, x, y: b.sort([x, y], 1, 2), (t(S32, 3, 20, 5), t(F32, 3, 20, 5))),
    Case("sort_first_columns", lambda b, x, y: b.sort([x, y], 1, 1, 7), (t(F32, 300, 60), t(S32, 300, 60))),
    Case("sort_first_row_of_three_axes", lambda b, x: b.sort([x], 0, 1, 1)[0], (t(U32, 33, 5, 3),)),
    Case("sort_one", lambda b, x: b.sort([x], 0)[0], (t(F32, 1, 5),)),
)

CASES = (*MAPS, *REDUCES, *ROWS, *DOTS, *MOVES, *INDEXED, *SCANS)
