"""What a loss scale would have done to a step's gradients, judged by the gradients of the same step in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from tpuflow.numerics.interpreter import Site
from tpuflow.numerics.measures import Counts
from tpuflow.numerics.rows import ScaleRow
from tpuflow.numerics.scopes import BACKWARD

SCALES = tuple(2.0**k for k in range(0, 25, 2))
"""The loss scales of the table: 1 to 2^24."""
DTYPES = ("float16", "bfloat16")
"""The types that they are judged for."""
JUST_BELOW = 1.0 - 2.0**-24
"""The fp32 number before 1."""


def limits(dtype: str, scale: float) -> tuple[float, float, float]:
    """Magnitudes above which a gradient, times the scale, is not rounded to zero; is normal; is rounded to infinity.

    Half the smallest subnormal is rounded to even, to zero; what lies less than half a unit above the largest number, down to it. bf16
    has no subnormals on the device.
    """
    kind = jnp.finfo(dtype)
    normal = float(kind.smallest_normal) * JUST_BELOW
    smallest = normal if dtype == "bfloat16" else float(kind.smallest_subnormal) / 2
    infinite = (float(kind.max) + 2.0 ** (kind.maxexp - kind.nmant - 2)) * JUST_BELOW
    return smallest / scale, normal / scale, infinite / scale


KEYS = tuple((dtype, scale, i) for dtype in DTYPES for scale in SCALES for i in range(3))
THRESHOLDS = (0.0, *(limits(dtype, scale)[i] for dtype, scale, i in KEYS))
"""Of the census: first all gradients that are not zero, then the three limits of each type and scale."""


def scale_rows(sites: Sequence[Site], counts: Sequence[Counts], dtype: str, loss_dtype: str) -> tuple[ScaleRow, ...]:
    """The table for gradients computed in `dtype`, from the census of an fp32 step.

    The scale itself is the first gradient of all, that of the loss, in the type that the policy rounds the loss to.
    """
    censuses = [
        np.reshape(c.census, (-1, len(THRESHOLDS))) for s, c in zip(sites, counts, strict=True) if s.phase == BACKWARD and s.thresholds
    ]
    gradients, *above = np.concatenate([np.zeros((1, len(THRESHOLDS)), np.int64), *censuses]).sum(axis=0, dtype=np.int64).tolist()
    found = dict(zip(KEYS, above, strict=True))
    return tuple(_row(scale, dtype, gradients, [found[dtype, scale, i] for i in range(3)], loss_dtype) for scale in SCALES)


def _row(scale: float, dtype: str, gradients: int, above: Sequence[int], loss_dtype: str) -> ScaleRow:
    kept, normal, overflow = above
    lost = loss_dtype == dtype and scale > limits(dtype, 1.0)[2]
    return ScaleRow(
        scale=scale,
        dtype=dtype,
        gradients=gradients + 1,
        kept=kept - overflow + (not lost),
        normal=normal - overflow + (not lost),
        overflow=overflow + lost,
    )
