"""Cases of reductions, prefix scans, sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.cases.case import BF16, BOOL, F16, F32, S32, U32, Arg, Case, over_dtypes

U8 = np.dtype(np.uint8)
_REDUCE: dict[str, Callable[..., Any]] = {
    "reduce_sum": lax.reduce_sum, "reduce_max": lax.reduce_max, "reduce_min": lax.reduce_min,
}  # fmt: skip
_SCANS: dict[str, Callable[..., Any]] = {
    "cumsum": lax.cumsum, "cumprod": lax.cumprod, "cummax": lax.cummax, "cummin": lax.cummin, "cumlogsumexp": lax.cumlogsumexp,
}  # fmt: skip


def _exact(name: str, fn: Callable[..., Any], *args: Arg, grad: bool = False) -> Case:
    return Case(name, fn, args, grad, "exact")


def _scan(fn: Callable[..., Any], axis: int, reverse: bool) -> Callable[[Any], Any]:
    return lambda x: fn(x, axis=axis, reverse=reverse)


def _larger(a: Any, b: Any) -> tuple[Any, Any]:
    """Of two (value, place) the one with the larger value; of equals the first."""
    second = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return jnp.where(second, b[0], a[0]), jnp.where(second, b[1], a[1])


def _largest_and_where(x: Any, axes: tuple[int, ...]) -> Any:
    return lax.reduce((x, _places(x)), (-jnp.inf, np.int32(2**30)), _larger, axes)


def _largest_in_windows(x: Any, windows: Any, strides: Any, padding: Any, dilation: Any) -> Any:
    start = (np.float32(-np.inf), np.int32(2**30))
    return lax.reduce_window((x, _places(x)), start, _larger, windows, strides, padding, window_dilation=dilation)


def _places(x: Any) -> Any:
    return jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)


_REDUCTIONS = [
    *(
        Case(
            f"{name}-{place}-{d.name}",
            lambda x, f=f, axes=axes: f(x, axes),
            (Arg((130, 257) if d == F32 else (13, 33), d),),
            d == F32,
            "long_sum",
        )
        for name, f in _REDUCE.items()
        for place, axes in (("rows", (1,)), ("columns", (0,)), ("all", (0, 1)))
        for d in (F32, F16, BF16)
    ),
    *(_exact(f"{n}-int32", lambda x, f=f: f(x, (0, 2)), Arg((7, 9, 11), S32)) for n, f in _REDUCE.items()),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (1,)), (Arg((13, 9), F32, "positive"),), True, "composed"),
    _exact("reduce_prod-int32", lambda x: lax.reduce_prod(x, (0,)), Arg((9, 7), S32)),
    *(
        _exact(f"reduce_{n}-bool", lambda x, f=f: f(x, (1,)), Arg((130, 9), BOOL))
        for n, f in (("and", lax.reduce_and), ("or", lax.reduce_or))
    ),
    *(
        _exact(f"reduce_{n}-{d.name}", lambda x, f=f: f(x, (0,)), Arg((13, 33), d, "bits"))
        for n, f in (("and", lax.reduce_and), ("or", lax.reduce_or), ("xor", lax.reduce_xor))
        for d in (S32, U32)
    ),
    _exact("reduce_max-bool", lambda x: (jnp.max(x, 1), jnp.min(x, 0), jnp.any(x), jnp.all(x)), Arg((13, 33), BOOL)),
    _exact("reduce_max-nan", lambda x: (jnp.max(x, 1), jnp.min(x, 0)), Arg((9, 13), F32, "edges")),
    *(
        _exact(f"reduce-two-arrays-{n}", lambda x, axes=axes: _largest_and_where(x, axes), Arg((13, 9, 5), F32, "ties"))
        for n, axes in (("row", (1,)), ("front", (0,)), ("some", (0, 2)), ("all", (0, 1, 2)))
    ),
    Case("reduce-by-logaddexp", lambda x: lax.reduce(x, -jnp.inf, jnp.logaddexp, (1,)), (Arg((13, 33)),), False, "composed"),
    _exact("reduce-nothing-of-two", lambda x: _largest_and_where(x, (1,)), Arg((3, 0))),
    _exact(
        "reduce_window-two-arrays", lambda x: _largest_in_windows(x, (3, 2), (2, 1), ((1, 1), (0, 1)), (1, 1)), Arg((9, 13), F32, "ties")
    ),
    _exact(
        "reduce_window-two-arrays-dilated", lambda x: _largest_in_windows(x, (2, 3), (1, 2), ((0, 2), (3, 0)), (3, 2)), Arg((9, 13), F32)
    ),
    Case("reduce-generic", lambda x: lax.reduce(x, 1.5, lambda a, b: a + b, (0,)), (Arg((13, 33)),), False, "sum"),
    Case("reduce-max-generic", lambda x: lax.reduce(x, np.float32(0.5), lax.max, (0, 1)), (Arg((13, 33)),), False, "exact"),
    _exact("reduce-empty", lambda x: (x.sum(0), x.prod(0), jnp.sum(x), jnp.max(x, 0, initial=-3.0)), Arg((0, 5))),
    _exact("reduce-scalar", lambda x: (jnp.sum(x), jnp.max(x)), Arg(())),
    *(
        _exact(f"arg{n}-{d.name}", lambda x, f=f, axis=axis: f(x, axis, np.int32), Arg((13, 257), d, domain))
        for n, f, axis in (("max", lax.argmax, 1), ("min", lax.argmin, 0))
        for d, domain in ((F32, "ties"), (F16, "edges"), (BF16, "normal"), (S32, "normal"), (BOOL, "normal"), (U8, "bits"))
    ),
    _exact("argmax-flat", lambda x: jnp.argmax(x), Arg((7, 9, 11))),
    Case("logsumexp", lambda x: jax.nn.logsumexp(x, axis=-1), (Arg((130, 10)),), True, "composed"),
    Case("softmax", lambda x: jax.nn.softmax(x), (Arg((13, 257)),), True, "composed"),
    *over_dtypes("log_softmax", jax.nn.log_softmax, Arg((33, 10)), grad=True, tolerance="composed"),
    Case("layer-norm", lambda x: jax.nn.standardize(x, axis=-1), (Arg((13, 130)),), True, "composed"),
    *over_dtypes("mean-and-var", lambda x: (x.mean(0), x.var(1)), Arg((13, 33)), tolerance="composed"),
    Case("median", lambda x: jnp.median(x, 1), (Arg((7, 9)),), True, "sum"),
    Case("l2-norm", lambda x: jnp.sqrt(jnp.sum(x * x)), (Arg((130, 257)),), True, "composed"),
]
_PREFIXES = [
    *(
        Case(f"{name}-{'reversed-' if reverse else ''}{d.name}", _scan(fn, axis, reverse), (Arg((7, 33), d, domain),), d == F32, "composed")
        for name, fn in _SCANS.items()
        for axis, reverse, d in ((0, False, F32), (1, True, F32), (1, False, F16), (0, True, BF16))
        for domain in (["unit"] if name == "cumprod" else ["normal"])
    ),
    *(_exact(f"{n}-int32", _scan(_SCANS[n], 1, False), Arg((5, 257), S32)) for n in ("cumsum", "cummax", "cummin")),
    _exact("cumsum-empty", lambda x: jnp.cumsum(x, 0), Arg((0, 5))),
    Case("cumsum-long", lambda x: jnp.cumsum(x), (Arg((1000,), S32),), False, "exact"),
]
_SORTS = [
    *(
        _exact(f"sort-{d.name}", lambda x: lax.sort(x, dimension=1), Arg((13, 130), d), grad=d == F32)
        for d in (F32, F16, BF16, S32, U32, BOOL)
    ),
    _exact("sort-columns", lambda x: lax.sort(x, dimension=0), Arg((33, 5), F32, "edges")),
    _exact("sort-stable-pairs", lambda k, v: lax.sort((k, v), num_keys=1), Arg((5, 33), F32, "ties"), Arg((5, 33), S32)),
    _exact(
        "sort-two-keys",
        lambda k, j, v: lax.sort((k, j, v), num_keys=2),
        Arg((9, 33), F32, "ties"),
        Arg((9, 33), S32, "count", 3),
        Arg((9, 33)),
    ),
    _exact("argsort", lambda x: jnp.argsort(x, axis=0), Arg((33, 5), F32, "ties")),
    _exact("top_k", lambda x: lax.top_k(x, 5), Arg((13, 130), F32, "distinct"), grad=True),
    _exact("top_k-ties-and-nan", lambda x: lax.top_k(x, 4)[0], Arg((5, 13), F32, "ties")),
    _exact("top_k-int32", lambda x: lax.top_k(x, 3), Arg((5, 33), S32)),
    _exact("top_k-bool", lambda x: lax.top_k(x, 3), Arg((5, 3), BOOL)),
    _exact("top_k-edges", lambda x: lax.top_k(x, 3), Arg((5, 64), F32, "edges")),
    _exact("top_k-many-of-a-few", lambda x: lax.top_k(x, 30), Arg((5, 33), F32, "ties")),
    _exact("top_k-of-each", lambda x: jax.vmap(jax.vmap(lambda y: lax.top_k(y, 2)))(x), Arg((3, 4, 40), S32)),
    _exact("top_k-bf16", lambda x: lax.top_k(x, 3)[0], Arg((5, 33), BF16)),
    _exact("searchsorted", lambda a, v: jnp.searchsorted(jnp.sort(a), v), Arg((33,)), Arg((9,))),
    _exact("searchsorted-bool", lambda a, v: jnp.searchsorted(jnp.sort(a), v), Arg((33,), BOOL), Arg((9,), BOOL)),
]
CASES = [*_REDUCTIONS, *_PREFIXES, *_SORTS]
