"""Cases of gather and scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.cases.case import BF16, BOOL, F16, F32, S32, U32, Arg, Case, over_dtypes

U8 = np.dtype(np.uint8)


def _exact(name: str, fn: Callable[..., Any], *args: Arg, grad: bool = False) -> Case:
    return Case(name, fn, args, grad, "exact")


def _windows(mode: str) -> Callable[[Any, Any], Any]:
    """Pieces of 3 x 2 of each 9 x 7 matrix, at places some of which are out of range."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(1, 0))
    return lambda x, i: lax.gather(x, i, numbers, (3, 2), mode=mode)


def _scatter_windows(x: Any, i: Any, u: Any, mode: str = "fill") -> Any:
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(0, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(1, 0))
    return lax.scatter_add(x, i, u, numbers, mode=mode)


_INDEX = Arg((11,), S32, "index", 13)
CASES = [
    *(
        _exact(f"take-rows-{d.name}", lambda x, i: x[i], Arg((13, 33), d), Arg((9,), S32, "count", 13), grad=d == F32)
        for d in (F32, F16, BF16, S32, BOOL)
    ),
    *(
        _exact(f"take-{mode}", lambda x, i, m=mode: jnp.take(x, i, 0, mode=m), Arg((13, 7)), _INDEX, grad=True)
        for mode in ("clip", "fill", "wrap")
    ),
    *(_exact(f"gather-fill-{d.name}", lambda x, i: x.at[i].get(mode="fill"), Arg((13, 3), d), _INDEX) for d in (S32, U32, F16, BOOL)),
    _exact("gather-fill-value", lambda x, i: x.at[i].get(mode="fill", fill_value=7), Arg((13, 3)), _INDEX),
    *(_exact(f"gather-windows-{mode}", _windows(mode), Arg((9, 7)), Arg((5, 2), S32, "index", 7), grad=True) for mode in ("clip", "fill")),
    _exact("gather-columns", lambda x, i: x[:, i], Arg((13, 33)), Arg((5, 3), S32, "count", 33), grad=True),
    _exact("gather-middle-axis", lambda x, i: x[:, i, 2:5], Arg((5, 13, 9)), Arg((4,), S32, "count", 13), grad=True),
    _exact("gather-points", lambda x, i, j: x[i, j], Arg((13, 33)), Arg((7,), S32, "count", 13), Arg((7,), S32, "count", 33), grad=True),
    _exact(
        "gather-outer-points",
        lambda x, i, j: x[i[:, None], j],
        Arg((13, 33)),
        Arg((4,), S32, "count", 13),
        Arg((7,), S32, "count", 33),
        grad=True,
    ),
    _exact(
        "gather-split-indices",
        lambda x, i, j: x[i, :, j],
        Arg((5, 7, 9)),
        Arg((4,), S32, "count", 5),
        Arg((4,), S32, "count", 9),
        grad=True,
    ),
    _exact("gather-one-row", lambda x, i: x[i], Arg((13, 33)), Arg((), S32, "count", 13), grad=True),
    _exact("gather-one-row-fill", lambda x, i: x.at[i + 13].get(mode="fill", fill_value=-1), Arg((13, 33)), Arg((), S32, "count", 13)),
    _exact("gather-uint8-index", lambda x, i: x[i], Arg((13, 5)), Arg((7,), U8, "count", 13)),
    _exact("gather-from-vector", lambda x, i: x[i], Arg((33,)), Arg((3, 5), S32, "count", 33), grad=True),
    _exact("gather-nothing", lambda x, i: x[i], Arg((13, 5)), Arg((0,), S32)),
    _exact("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 1), Arg((13, 9)), Arg((13, 4), S32, "count", 9), grad=True),
    _exact("take_along_axis-rows", lambda x, i: jnp.take_along_axis(x, i, 0), Arg((13, 9)), Arg((4, 9), S32, "count", 13), grad=True),
    _exact(
        "take_along_axis-3d", lambda x, i: jnp.take_along_axis(x, i[..., None], 2), Arg((5, 4, 9)), Arg((5, 4), S32, "count", 9), grad=True
    ),
    *(
        _exact(
            f"take_along_axis-label-{d.name}",
            lambda x, i: jnp.take_along_axis(x, i[:, None], 1),
            Arg((13, 9), d),
            Arg((13,), S32, "count", 9),
        )
        for d in (F16, BF16, S32, BOOL)
    ),
    _exact(
        "label-of-each-fill",
        lambda x, i: jnp.take_along_axis(x, i[:, None], 1, mode="fill"),
        Arg((13, 9)),
        Arg((13,), S32, "index", 9),
        grad=True,
    ),
    _exact("label-of-each-columns", lambda x, i: jnp.take_along_axis(x, i[None], 0), Arg((13, 9)), Arg((9,), S32, "count", 13), grad=True),
    _exact("vmap-set-entry", jax.vmap(lambda x, i, u: x.at[i].set(u)), Arg((9, 13)), Arg((9,), S32, "index", 13), Arg((9,)), grad=True),
    _exact(
        "vmap-max-entry",
        jax.vmap(lambda x, i, u: x.at[i].max(u, mode="clip")),
        Arg((9, 13), S32),
        Arg((9,), S32, "index", 13),
        Arg((9,), S32),
    ),
    _exact("scatter-one-row", lambda x, i, u: x.at[i].add(u), Arg((13, 9)), Arg((), S32, "index", 13), Arg((9,)), grad=True),
    _exact("scatter-one-row-outside", lambda x, u: x.at[20].set(u, mode="drop"), Arg((13, 9)), Arg((9,))),
    _exact(
        "scatter-one-window-bool",
        lambda x, i, u: lax.dynamic_update_slice(x, u, (i, i)).at[i, 2].set(True),
        Arg((13, 9), BOOL),
        Arg((), S32),
        Arg((3, 4), BOOL),
    ),
    _exact("vmap-gather", jax.vmap(lambda x, i: x[i]), Arg((5, 13, 3)), Arg((5, 4), S32, "count", 13), grad=True),
    _exact(
        "vmap-dynamic-slice",
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 7))),
        Arg((5, 13, 7)),
        Arg((5,), S32, "index", 13),
        grad=True,
    ),
    _exact(
        "vmap-dynamic-update",
        jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,))),
        Arg((5, 13)),
        Arg((5, 3)),
        Arg((5,), S32, "index", 13),
    ),
    _exact("one_hot", lambda i: jax.nn.one_hot(i, 10), Arg((33,), S32, "index", 10)),
    Case("embedding", lambda x, i: x[i].sum(0), (Arg((33, 9)), Arg((7, 5), S32, "count", 33)), True, "sum"),
    _exact("scatter-add-to-one-element", lambda x, i, u: x.at[i].add(u), Arg((1,), S32), Arg((4,), S32, "index", 2), Arg((4,), S32)),
    _exact("take-of-one-element", lambda x, i: x.at[i].get(mode="fill", fill_value=7.0), Arg((1,)), Arg((4,), S32, "index", 2)),
    *over_dtypes("scatter-add", lambda x, i, u: x.at[i].add(u), Arg((13, 9)), _INDEX, Arg((11, 9)), grad=True, tolerance="sum"),
    _exact("scatter-add-int32", lambda x, i, u: x.at[i].add(u), Arg((13, 9), S32), _INDEX, Arg((11, 9), S32)),
    _exact("scatter-add-clip", lambda x, i, u: x.at[i].add(u, mode="clip"), Arg((13, 9), S32), _INDEX, Arg((11, 9), S32)),
    _exact("scatter-sub", lambda x, i, u: x.at[i].subtract(u), Arg((13, 9)), Arg((5,), S32, "distinct"), Arg((5, 9))),
    *(
        _exact(f"scatter-set-{d.name}", lambda x, i, u: x.at[i].set(u), Arg((13, 9), d), Arg((5,), S32, "distinct"), Arg((5, 9), d))
        for d in (F32, BF16, S32, BOOL)
    ),
    _exact("scatter-set-points", lambda x, u: x.at[jnp.arange(7), jnp.arange(7) * 2].set(u), Arg((13, 33)), Arg((7,)), grad=True),
    _exact("scatter-set-slice", lambda x, u: x.at[2:9:3, 1].set(u), Arg((13, 5)), Arg((3,)), grad=True),
    _exact("scatter-set-scalar", lambda x: x.at[3].set(0.0), Arg((13, 5)), grad=True),
    *(_exact(f"scatter-{n}", lambda x, i, u, n=n: getattr(x.at[i], n)(u), Arg((13, 9)), _INDEX, Arg((11, 9))) for n in ("min", "max")),
    Case("scatter-mul", lambda x, i, u: x.at[i].multiply(u), (Arg((13, 9)), _INDEX, Arg((11, 9))), False, "sum"),
    _exact("scatter-max-bool", lambda x, i, u: x.at[i].max(u), Arg((13,), BOOL), _INDEX, Arg((11,), BOOL)),
    _exact("scatter-columns", lambda x, i, u: x.at[:, i].add(u), Arg((5, 13), S32), _INDEX, Arg((5, 11), S32)),
    Case("scatter-windows", _scatter_windows, (Arg((9, 7)), Arg((5, 2), S32, "index", 7), Arg((3, 5, 2))), True, "sum"),
    Case(
        "scatter-windows-clip",
        lambda x, i, u: _scatter_windows(x, i, u, "clip"),
        (Arg((9, 7)), Arg((5, 2), S32, "index", 7), Arg((3, 5, 2))),
        False,
        "sum",
    ),
    *(_exact(f"scatter-apply-{d.name}", lambda x, i: x.at[i].apply(lambda a: a * 2 + 1), Arg((13, 9), d), _INDEX) for d in (F32, S32)),
    _exact("scatter-apply-distinct", lambda x: x.at[jnp.arange(5) * 2].apply(jnp.negative, unique_indices=True), Arg((13, 9))),
    _exact("scatter-apply-entry", jax.vmap(lambda x, i: x.at[i].apply(jnp.abs)), Arg((9, 13)), Arg((9, 4), S32, "index", 13)),
    _exact("scatter-apply-outside", lambda x, i: x.at[i + 6].apply(jnp.negative, mode="drop"), Arg((13,)), _INDEX),
    _exact("scatter-nothing", lambda x, i, u: x.at[i].add(u), Arg((13, 5)), Arg((0,), S32), Arg((0, 5))),
    Case("segment_sum", lambda x, i: jax.ops.segment_sum(x, i, 5), (Arg((33, 3)), Arg((33,), S32, "count", 5)), True, "sum"),
    _exact("bincount", lambda i: jnp.bincount(i, length=9), Arg((130,), S32, "count", 9)),
]
