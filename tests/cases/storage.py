"""Cases of types that are only stored: fp8, and integers of 4 and 2 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from tests.cases.case import BF16, F16, F32, S32, Arg, Case

FP8 = tuple(
    np.dtype(getattr(ml_dtypes, f"float8_{name}")) for name in ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e4m3", "e3m4")
)
SMALL = tuple(np.dtype(getattr(ml_dtypes, name)) for name in ("int4", "uint4", "int2", "uint2"))
E4M3, E5M2, S4, U4 = FP8[0], FP8[1], SMALL[0], SMALL[1]
S8, U8 = np.dtype(np.int8), np.dtype(np.uint8)


def _kept(x: jax.Array) -> jax.Array:
    """Moves only."""
    return jnp.concatenate([lax.rev(x, (0,)), jnp.pad(x[2:4, ::3], ((0, 0), (1, x.shape[1] - -(-x.shape[1] // 3) - 1)))]).T


def _chosen(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(pred, x, y)


def _looped(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A carry of a stored type, and one stored a trip."""
    return lax.scan(lambda c, row: ((c.astype(F32) / 2 + row.astype(F32)).astype(c.dtype), c), x[0], x)


def _arithmetic(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    return x + y, x * y, x - y, -x, lax.max(x, y), x < y, x == y


def _bits(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
    return (
        x & n, x | n, x ^ n, ~x, lax.shift_left(x, n), lax.shift_right_logical(x, n), lax.shift_right_arithmetic(x, n),
    )  # fmt: skip


def _counted(x: jax.Array) -> tuple[jax.Array, ...]:
    """XLA:CPU counts the copies of the sign above a negative number's own bits, too: of signed types these are not judged by it."""
    return lax.population_count(x), lax.clz(x)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _quantized(x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer with weights of fp8, and a scale for each of its columns."""
    scale = jnp.max(jnp.abs(w), axis=0) / 448
    return _dot((x * 16).astype(E4M3), (w / scale).astype(E4M3)) * scale / 16


def _rows() -> list[Case]:
    rows = []
    for t in FP8:
        # XLA:CPU makes NaN of small negative numbers in types without -0 if LLVM's optimisations are off
        how = "positive" if t.name.endswith("fnuz") else "wide"
        rows += [
            Case(f"convert-{d.name}-{t.name}", lambda x, t=t: x.astype(t), (Arg((40, 129), d, how),), tolerance="exact") for d in (F32, F16)
        ]
        rows.append(Case(f"convert-{t.name}-float32", lambda x: x.astype(F32), (Arg((3, 128), t, "bits"),), tolerance="exact"))
        rows.append(Case(f"moves-{t.name}", _kept, (Arg((9, 130), t, "normal"),), tolerance="exact"))
        # XLA:CPU steps from the smallest negative number to the bits of -0, which are NaN's in types without it
        rows.append(Case(f"nextafter-{t.name}", lax.nextafter, (Arg((7, 33), t, how), Arg((7, 33), t, how)), tolerance="exact"))
    for t in SMALL:
        rows += [
            Case(f"convert-{d.name}-{t.name}", lambda x, t=t: x.astype(t), (Arg((40, 129), d, how),), tolerance="exact")
            for d, how in ((F32, "wide"), (S32, "bits"), (S8, "bits"), (U8, "bits"))
        ]
        rows += [
            Case(f"convert-{t.name}-{d.name}", lambda x, d=d: x.astype(d), (Arg((3, 128), t),), tolerance="exact") for d in (F32, S32, S8)
        ]
        rows.append(Case(f"moves-{t.name}", _kept, (Arg((9, 130), t),), tolerance="exact"))
        rows.append(Case(f"arithmetic-{t.name}", _arithmetic, (Arg((7, 33), t),) * 2, tolerance="exact"))
        rows.append(Case(f"bits-{t.name}", _bits, (Arg((7, 33), t), Arg((7, 33), t, "count", 2)), tolerance="exact"))
        rows.append(Case(f"chosen-{t.name}", _chosen, (Arg((7, 33), np.dtype(bool)), Arg((7, 33), t), Arg((7, 33), t)), tolerance="exact"))
        rows.append(
            Case(f"bitcast-{t.name}", lambda x, t=t: lax.bitcast_convert_type(x, t), (Arg((7, 33), U8, "bits"),), tolerance="exact")
        )
    rows += [Case(f"counted-{t.name}", _counted, (Arg((7, 33), t),), tolerance="exact") for t in SMALL if "uint" in t.name]
    for t in (E4M3, E5M2):
        rows += [
            Case(f"convert-any-float32-{t.name}", lambda x, t=t: x.astype(t), (Arg((40, 129), F32, "bits"),), tolerance="exact"),
            Case(f"arithmetic-{t.name}", _arithmetic, (Arg((7, 33), t), Arg((7, 33), t, "edges")), tolerance="exact"),
            Case(f"chosen-{t.name}", _chosen, (Arg((7, 33), np.dtype(bool)), Arg((7, 33), t), Arg((7, 33), t)), tolerance="exact"),
            Case(f"loop-{t.name}", _looped, (Arg((6, 33), t),), tolerance="exact"),
            Case(f"gather-{t.name}", lambda x, i: x[i], (Arg((20, 33), t), Arg((7,), S32, "index", 20)), tolerance="exact"),
            Case(
                f"scatter-{t.name}",
                lambda x, i, y: x.at[i].set(y),
                (Arg((20, 33), t), Arg((1,), S32, "count", 20), Arg((1, 33), t)),
                tolerance="exact",
            ),
            Case(f"sum-{t.name}", lambda x: jnp.sum(x.astype(F32), 0), (Arg((20, 33), t),), tolerance="sum"),
            Case(f"bitcast-{t.name}", lambda x, t=t: lax.bitcast_convert_type(x, t), (Arg((7, 33), U8, "bits"),), tolerance="exact"),
            Case(f"dot-{t.name}", _dot, (Arg((33, 70), t), Arg((70, 20), t)), tolerance="sum"),
        ]
    rows += [
        Case(
            "constant-float8_e4m3fn",
            lambda x: x.astype(F32) + np.arange(-6, 6).astype(E4M3).astype(F32),
            (Arg((3, 12), E4M3),),
            tolerance="exact",
        ),
        Case("constant-int4", lambda x: x + np.arange(-6, 6).astype(S4), (Arg((3, 12), S4),), tolerance="exact"),
        Case("sorted-float8_e4m3fn", lambda x: lax.sort(x), (Arg((7, 33), E4M3),), tolerance="exact"),
        Case("sorted-int4", lambda x: lax.sort(x), (Arg((7, 33), S4),), tolerance="exact"),
        Case("sorted-uint4", lambda x: lax.sort(x), (Arg((7, 33), U4),), tolerance="exact"),
        Case("gather-int4", lambda x, i: x[i], (Arg((20, 33), S4), Arg((7,), S32, "index", 20)), tolerance="exact"),
        Case("convert-float8_e5m2-float8_e4m3fn", lambda x: x.astype(E4M3), (Arg((3, 128), E5M2, "bits"),), tolerance="exact"),
        Case("convert-bfloat16-float8_e5m2", lambda x: x.astype(E5M2), (Arg((30, 128), BF16, "bits"),), tolerance="exact"),
        Case("quantized-float8_e4m3fn", _quantized, (Arg((17, 60)), Arg((60, 33))), tolerance="composed"),
    ]
    return rows


CASES = tuple(_rows())
