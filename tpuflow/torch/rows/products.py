"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuflow.torch.rows.pooling import Sizes, for_each
from tpuflow.torch.table import lowers


@lowers("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default", "aten.matmul.default")
def _matmul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b)


@lowers("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = jnp.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


# --- convolutions -----------------------------------------------------------------------------------------------------


@lowers("aten.convolution.default")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int
) -> Any:
    """`x` [N, C, ...]; `weight` [O, C / groups, ...], of a transposed convolution [C, O / groups, ...]."""
    y = _convolved(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))


def _convolved(
    x: Any, weight: Any, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int
) -> Any:
    spatial = x.ndim - 2
    stride, padding, dilation, output_padding = (for_each(v, spatial) for v in (stride, padding, dilation, output_padding))
    if not transposed:
        pads = [(p, p) for p in padding]
        return lax.conv_general_dilated(x, weight, stride, pads, rhs_dilation=dilation, feature_group_count=groups)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + more) for r, p, more in zip(reach, padding, output_padding, strict=True)]
    flipped = jnp.flip(_turned(weight, groups), tuple(range(2, weight.ndim)))
    ones = (1,) * spatial
    return lax.conv_general_dilated(
        x, flipped, ones, pads, lhs_dilation=stride, rhs_dilation=dilation, feature_group_count=groups
    )  # fmt: skip


def _turned(weight: Any, groups: int) -> Any:
    """[C, O / g, ...] -> [O, C / g, ...]."""
    c, o, *window = weight.shape
    parts = weight.reshape(groups, c // groups, o, *window)
    return jnp.swapaxes(parts, 1, 2).reshape(groups * o, c // groups, *window)


@lowers("aten.convolution_backward.default")
def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool,
    output_padding: Sizes, groups: int, mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of input, weight, bias: those that the mask asks for."""

    def convolve(x: Any, weight: Any) -> Any:
        return _convolved(x, weight, stride, padding, dilation, transposed, output_padding, groups)

    _, pull = jax.vjp(convolve, x, weight)
    of_x, of_weight = pull(grad.astype(x.dtype)) if mask[0] or mask[1] else (None, None)
    of_bias = jnp.sum(grad, (0, *range(2, grad.ndim))) if mask[2] else None
    return of_x if mask[0] else None, of_weight if mask[1] else None, of_bias


# --- products of groups of rows, each with a matrix of its own -----------------------------------------------------------


def _members(ends: Any, count: int, dtype: Any) -> Any:
    """[groups, count]: 1 where a row is a group's; `ends` [groups] are the first rows after each."""
    rows, starts = jnp.arange(count, dtype=jnp.int32), jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return ((rows >= starts[:, None]) & (rows < ends[:, None])).astype(dtype)


@lowers("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(a: Any, b: Any, offs: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows of `a` [m, k] times their group's of `b` [g, k, n] -> [m, n]; or columns of `a` [m, k] times rows of `b` [k, n] -> [g, m, n].

    Every group multiplies all rows and keeps its own: shapes do not depend on values.
    """
    if a.ndim == 2 and b.ndim == 2:
        return jnp.einsum("mk,gk,kn->gmn", a, _members(offs, a.shape[1], a.dtype), b)
    if a.ndim == 2:
        kept = _members(offs, a.shape[0], a.dtype)[:, :, None]
        return jnp.sum(jnp.matmul(a, b) * kept, 0)
    if b.ndim == 2:
        kept = _members(offs, b.shape[1], b.dtype)[:, None, :]
        return jnp.sum(jnp.matmul(a, b) * kept, 0)
    return jnp.matmul(a, b)


@lowers("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_backward(a: Any, b: Any, offs: Any, grad: Any) -> tuple[Any, Any]:
    """The gradients of rows [m, k] and of matrices [g, k, n]."""
    return grouped_mm(grad, jnp.swapaxes(b, 1, 2), offs), grouped_mm(a.T, grad, offs)
