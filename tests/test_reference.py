"""The reference engine against plain NumPy, under both schedules, and its launch interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests import programs
from tests.places import axis_positions, tile_positions
from tpuflow.device.reference import ReferenceEngine
from tpuflow.dtypes import F16, F32, S32
from tpuflow.errors import ConfigError, LaunchError
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.windows import present, view_layout, view_problem

Arrays = Sequence[np.ndarray]
SCHEDULES = ("late", "early")


def _take(a: Arrays) -> list[np.ndarray]:
    table, index = a
    inside = (index >= 0) & (index < len(table))
    return [-np.where(inside[:, None], table[np.clip(index, 0, len(table) - 1)], np.float32(-1))]


def _scatter(mode: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Arrays], list[np.ndarray]]:
    def expected(a: Arrays) -> list[np.ndarray]:
        table = a[0].copy()
        for row, update in zip(a[1], a[2], strict=True):
            if 0 <= row < len(table):
                table[row] = mode(table[row], update)
        return [table]

    return expected


def _update_slice(a: Arrays) -> list[np.ndarray]:
    x, update, start = a[0].copy(), a[1], int(a[2])
    x[start : start + 5] = update
    return [x[start : start + 5], x]


def _pad(a: Arrays) -> list[np.ndarray]:
    return [np.pad(a[0], ((2, 3), (3, 0)), constant_values=7)]


def _dilate(a: Arrays) -> list[np.ndarray]:
    out = np.full((60, 91), np.float32(7))
    out[1:59:3, 2:90:3] = a[0]
    return [out]


def _sort(a: Arrays) -> list[np.ndarray]:
    order = np.argsort(a[0], axis=1, kind="stable")
    return [np.take_along_axis(a[0], order, 1), order.astype(np.int32)]


def _matmul(a: Arrays) -> list[np.ndarray]:
    exact = a[0].astype(np.float64) @ a[1].astype(np.float64)
    return [exact.astype(np.float32 if a[0].dtype.kind == "f" else np.int32)]


def _conv(a: Arrays) -> list[np.ndarray]:
    x = np.pad(a[0].astype(np.float64), ((3, 12), (0, 0)))
    exact = sum(x[2 * r : 2 * r + 21 : 2] @ a[1][r].astype(np.float64) for r in range(5))
    return [np.asarray(exact).astype(np.float32 if a[0].dtype.kind == "f" else np.int32)]


def _two_layer(a: Arrays) -> list[np.ndarray]:
    hidden = np.maximum(a[0].astype(np.float64) @ a[1], 0)
    return [(hidden @ a[2]).astype(np.float32)]


CASES = {
    "map": (programs.map_program(), lambda a: [a[0] + a[1]]),
    "map_f16": (programs.map_program(op="mul", dtype=F16), lambda a: [a[0] * a[1]]),
    "map_s32": (programs.map_program(op="xor", dtype=S32), lambda a: [a[0] ^ a[1]]),
    "map_row": (programs.map_program((130,), (128,)), lambda a: [a[0] + a[1]]),
    "map_scalar": (programs.map_program((), ()), lambda a: [a[0] + a[1]]),
    "map_empty": (programs.map_program((0, 5)), lambda a: [a[0] + a[1]]),
    "in_place": (programs.in_place_program(), lambda a: [a[0] + a[1]]),
    "reduce": (programs.reduce_program(), lambda a: [a[0].sum(1, keepdims=True, dtype=np.float64).astype(np.float32)]),
    "reduce_max": (programs.reduce_program(op="max"), lambda a: [a[0].max(1, keepdims=True)]),
    "reduce_nothing": (programs.reduce_program((20, 0)), lambda a: [np.zeros((20, 1), np.float32)]),
    "matmul": (programs.matmul_program(), _matmul),
    "matmul_s32": (programs.matmul_program(dtype=S32), _matmul),
    "matmul_nothing": (programs.matmul_program((20, 40, 0)), _matmul),
    "conv": (programs.conv_program(), _conv),
    "conv_s32": (programs.conv_program(S32), _conv),
    "loop": (programs.loop_program(), lambda a: [np.int32(3), a[1] * a[2] * a[2] * a[2]]),
    "switch": (programs.switch_program(), lambda a: [a[1] - a[2]]),
    "take": (programs.take_program(), _take),
    "scatter": (programs.scatter_program(), _scatter(np.add)),
    "scatter_set": (programs.scatter_program("set", rows=4), _scatter(lambda old, new: new)),
    "scatter_max": (programs.scatter_program("max"), _scatter(np.maximum)),
    "cumulative": (programs.cumulative_program(), lambda a: [np.cumsum(a[0], 1, dtype=np.float32)]),
    "cumulative_min": (programs.cumulative_program(op="min"), lambda a: [np.minimum.accumulate(a[0], 1)]),
    "sort": (programs.sort_program(), _sort),
    "concatenate": (programs.concatenate_program(), lambda a: [np.concatenate(a)]),
    "update_slice": (programs.update_slice_program(), _update_slice),
    "resident": (programs.resident_program(), lambda a: [a[0] * a[1]]),
    "counter": (programs.counter_program(), lambda a: [(a[0][:4] + a[0][4:8]) + a[0][8:]]),
    "two_layer": (programs.two_layer_program(), _two_layer),
    "transpose": (programs.move_program("transpose"), lambda a: [a[0].T]),
    "pad": (programs.move_program("pad"), _pad),
    "dilate": (programs.move_program("dilate"), _dilate),
    "reverse": (programs.move_program("reverse"), lambda a: [a[0][::-1]]),
    "stretch": (programs.move_program("stretch"), lambda a: [np.broadcast_to(a[0][:, None], (20, 40, 30))]),
    "stride": (programs.move_program("stride"), lambda a: [a[0][1:20:3, ::2]]),
}
ROUNDED_SUMS = (
    "reduce",
    "matmul",
    "conv",
    "two_layer",
)  # summed in another order than the oracle: compared within 1e-5 of the largest value
INTEGERS = {"trips": 3, "index": 2, "start": 13}


def arguments(program: programs.Program) -> list[np.ndarray]:
    """Random arrays, fixed 0-d integers, row numbers of which some are out of range and some repeat."""
    rng = np.random.default_rng(5)
    fixed = {p.name: np.asarray(INTEGERS[p.name], np.int32) for p in program.inputs if p.shape == () and p.name in INTEGERS}
    return [fixed.get(p.name, programs.random_array(rng, p.dtype, p.shape, -3, 9)) for p in program.inputs]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_kernel_computes_what_numpy_computes(name: str, schedule: str) -> None:
    program, expected = CASES[name]
    inputs = arguments(program)
    outputs, _ = ReferenceEngine(program, schedule=schedule).launch(inputs)
    for found, wanted in zip(outputs, expected(inputs), strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        tolerance = 1e-5 * np.abs(wanted).max(initial=0) if name in ROUNDED_SUMS else 0
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


def test_a_while_loop_stops_when_its_predicate_turns_false() -> None:
    outputs, _ = ReferenceEngine(programs.while_program()).launch([np.float32(1.5), np.float32(100)])
    assert [float(x) for x in outputs] == [192.0, 7.0]


def test_infeed_items_come_in_order_and_outfeed_items_are_stacked() -> None:
    items = np.arange(5 * 200, dtype=np.float32).reshape(5, 10, 20)
    (total,), (sent,) = ReferenceEngine(programs.feed_program()).launch([np.int32(4), np.zeros((10, 20), np.float32)], [items])
    np.testing.assert_array_equal(sent, np.cumsum(items, 0)[:4])
    np.testing.assert_array_equal(total, sent[-1])


def test_no_trips_send_nothing() -> None:
    start = np.ones((10, 20), np.float32)
    (total,), (sent,) = ReferenceEngine(programs.feed_program()).launch([np.int32(0), start], [np.empty((0, 10, 20), np.float32)])
    assert sent.shape == (0, 10, 20)
    np.testing.assert_array_equal(total, start)


def test_launches_are_independent() -> None:
    engine = ReferenceEngine(programs.in_place_program())
    inputs = arguments(engine.program)
    kept = [x.copy() for x in inputs]
    first, second = engine.launch(inputs)[0], engine.launch(inputs)[0]
    np.testing.assert_array_equal(first[0], second[0])
    for x, y in zip(inputs, kept, strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_infeed_that_runs_dry_is_a_clear_error() -> None:
    engine = ReferenceEngine(programs.feed_program())
    with pytest.raises(LaunchError, match=r"an infeed has run dry.*\('items' 3\)"):
        engine.launch([np.int32(4), np.zeros((10, 20), np.float32)], [np.zeros((3, 10, 20), np.float32)])


def test_arguments_that_do_not_fit_the_signature_are_refused() -> None:
    engine = ReferenceEngine(programs.map_program())
    with pytest.raises(LaunchError, match=r"takes 2 input arrays \(\['x', 'y'\]\), got 1"):
        engine.launch([np.zeros((20, 300), np.float32)])
    with pytest.raises(LaunchError, match=r"input 'y': expected f32\[20, 300\], got float64\[20, 300\]"):
        engine.launch([np.zeros((20, 300), np.float32), np.zeros((20, 300))])


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown schedule 'random'"):
        ReferenceEngine(programs.map_program(), schedule="random")


# --- windows


def test_what_is_present_follows_the_definition_element_by_element() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        extent, dilation, length = int(rng.integers(0, 9)), int(rng.integers(1, 5)), int(rng.integers(0, 9))
        base, step = (int(x) for x in rng.integers(-9, 10, 2))
        axis = WindowAxis(extent, 1, step=step, dilation=dilation)
        elements, ok = axis_positions(axis, length, base)
        at, found = present(axis, length, base)
        assert list(at) == np.flatnonzero(ok).tolist(), axis
        assert list(found) == (elements[ok] if step else np.unique(elements[ok])).tolist(), axis


def test_what_is_present_of_long_axes_is_two_ranges() -> None:
    axis = WindowAxis(10**12, 1, step=-3, dilation=2)
    assert present(axis, 10**13, 5) == (range(1, 3, 2), range(1, -2, -3))


def test_a_view_is_a_reshape_and_a_permutation() -> None:
    window = Window(0, Tile("vmem", 0, F32, (TileAxis(2), TileAxis(3), TileAxis(4), TileAxis(1))),
                    (WindowAxis(2, 4), WindowAxis(3, 8), WindowAxis(4, 1), WindowAxis(1, 77)))  # fmt: skip
    assert view_problem(window, 24) == ""
    layout = view_layout(window)
    x = np.arange(24)
    view = x.reshape(layout.dims).transpose(layout.permutation)
    assert view.shape == (2, 3, 4, 1)
    for i, j, k in np.ndindex(2, 3, 4):
        assert view[i, j, k, 0] == 4 * i + 8 * j + k


@pytest.mark.parametrize(
    ("axes", "elems", "why"),
    [
        ((WindowAxis(4, 1),), 5, "hold 4 elements, the buffer 5"),
        ((WindowAxis(4, 1), WindowAxis(2, 8)), 8, "not row-major in any order"),
        ((WindowAxis(4, 2), WindowAxis(2, 2)), 8, "not row-major in any order"),
        ((WindowAxis(4, -1),), 4, "not row-major in any order"),
    ],
)
def test_what_is_no_dense_view_is_said_to_be_none(axes: tuple[WindowAxis, ...], elems: int, why: str) -> None:
    assert why in view_problem(Window(0, Tile("vmem", 0, F32, (TileAxis(1),) * len(axes)), axes), elems)


def test_tile_positions_use_valid_lengths_and_registers() -> None:
    register = Tile("smem", 0, S32)
    tile = Tile("vmem", 0, F32, (TileAxis(8, 0, 20),))
    window = Window(0, tile, (WindowAxis(30, 1, origin=1, grid=((0, 8),), register=register),))
    ((elements, ok),) = tile_positions(window, (2,), (12,))
    assert elements.tolist() == [29, 30, 31, 32] and ok.tolist() == [True, False, False, False]
