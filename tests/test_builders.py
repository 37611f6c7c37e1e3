"""The operations as any importer calls them: values, plain data, and bodies that are Python functions. No JAX takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tpuflow.dtypes import F32, S32
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.operations.convolution import ConvAxes, convolution
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.loops import scan, switch, while_loop
from tpuflow.lower.operations.reducers import reduce_by, reduce_window_by
from tpuflow.lower.operations.rows import SliceAxes
from tpuflow.lower.operations.scatter import scatter
from tpuflow.lower.operations.window import SlidingWindow

ROWS = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]], np.float32)


def run(build: Callable[..., Sequence[Value]], *arrays: np.ndarray) -> list[np.ndarray]:
    """What the graph gives that `build(builder, *values)` makes."""
    b = Builder("f", [TensorType(dtype_of(a.dtype), a.shape) for a in arrays])
    return [np.asarray(x) for x in interpret(verify(b.finish(build(b, *b.inputs))), *arrays)]


def _larger_with_its_place(b: Builder, x: Value, i: Value, y: Value, j: Value) -> tuple[Value, Value]:
    first = b.or_(b.gt(x, y), b.and_(b.eq(x, y), b.le(i, j)))
    return b.select(first, x, y), b.select(first, i, j)


def test_a_loop_hands_its_body_what_stays_what_is_carried_and_one_item() -> None:
    def body(b: Builder, scale: Value, total: Value, row: Value) -> tuple[Value, Value]:
        total = b.add(total, b.mul(row, b.splat(scale, row.shape)))
        return total, b.neg(total)

    def build(b: Builder, scale: Value, start: Value, rows: Value) -> tuple[Value, ...]:
        return scan(b, body, 3, [scale], [start], [rows], [start.type], reverse=True)

    total, made = run(build, np.float32(2), np.zeros(4, np.float32), ROWS)
    np.testing.assert_array_equal(total, 2 * ROWS.sum(0))
    np.testing.assert_array_equal(made, -2 * ROWS[::-1].cumsum(0)[::-1])


def test_a_loop_goes_on_as_long_as_its_condition_holds() -> None:
    def below(b: Builder, limit: Value, x: Value) -> tuple[Value]:
        return (b.lt(x, limit),)

    def build(b: Builder, limit: Value, x: Value) -> tuple[Value, ...]:
        return while_loop(b, below, lambda b, limit, x: (b.mul(x, 2),), [limit], [x])

    assert run(build, np.float32(100), np.float32(3)) == [192]


def test_a_switch_takes_the_branch_of_its_number_and_the_last_beyond() -> None:
    def build(b: Builder, number: Value, x: Value) -> tuple[Value, ...]:
        return switch(b, number, [lambda b, x: (b.neg(x),), lambda b, x: (b.mul(x, x),)], [x])

    assert [run(build, np.int32(n), np.float32(3)) for n in (0, 1, 7)] == [[-3], [9], [9]]


def test_a_reduction_by_any_body_carries_several_arrays() -> None:
    def build(b: Builder, x: Value) -> tuple[Value, ...]:
        starts = [b.scalar(-np.inf), b.scalar(9, S32)]
        return reduce_by(b, _larger_with_its_place, [x, b.iota(TensorType(S32, x.shape), 1)], starts, (1,))

    largest, place = run(build, ROWS)
    np.testing.assert_array_equal(largest, ROWS.max(1))
    np.testing.assert_array_equal(place, ROWS.argmax(1))


def test_a_windowed_reduction_by_any_body_carries_several_arrays() -> None:
    def build(b: Builder, x: Value) -> tuple[Value, ...]:
        starts = [b.scalar(-np.inf), b.scalar(9, S32)]
        window = SlidingWindow.of((1, 2), (1, 2), ((0, 0), (0, 0)))
        return reduce_window_by(b, _larger_with_its_place, [x, b.iota(TensorType(S32, x.shape), 1)], starts, window)

    largest, place = run(build, ROWS)
    np.testing.assert_array_equal(largest, ROWS.reshape(3, 2, 2).max(2))
    np.testing.assert_array_equal(place, ROWS.reshape(3, 2, 2).argmax(2) + np.array([0, 2]))


def test_slices_are_taken_and_changed_by_plain_numbers() -> None:
    places = np.array([[2], [7], [0]], np.int32)
    axes = SliceAxes(window=(1,), collapsed=(0,), indexed=(0,))
    (filled,) = run(lambda b, x, i: [gather(b, x, i, axes, (1, 4), fill=-1.0)], ROWS, places)
    (clipped,) = run(lambda b, x, i: [gather(b, x, i, axes, (1, 4))], ROWS, places)
    (added,) = run(lambda b, x, i: [scatter(b, x, i, x, axes, "add")], ROWS, places)
    np.testing.assert_array_equal(filled, [ROWS[2], np.full(4, -1), ROWS[0]])
    np.testing.assert_array_equal(clipped, ROWS[[2, 2, 0]])
    np.testing.assert_array_equal(added, ROWS + np.stack([ROWS[2], np.zeros(4), ROWS[0]]))


def test_a_convolution_is_told_which_axis_is_what() -> None:
    kernel = np.array([[[1, 10, 100]]], np.float32)
    axes = ConvAxes(image=(0, 1, 2), kernel=(0, 1, 2), out=(2, 1, 0))
    window = SlidingWindow.of((3,), (1,), ((1, 0),))
    (found,) = run(lambda b, x, w: [convolution(b, x, w, axes, window, preferred=F32)], ROWS[:, None], kernel)
    x = np.pad(ROWS, ((0, 0), (1, 0))).T
    np.testing.assert_array_equal(found[:, 0], x[:3] + 10 * x[1:4] + 100 * x[2:5])
