"""Cases of contractions, convolutions and pooling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.cases.case import BF16, F16, F32, S32, Arg, Case, over_dtypes

S8, U8 = np.dtype(np.int8), np.dtype(np.uint8)


def _dot(contract: Any, batch: Any = ((), ()), **options: Any) -> Callable[[Any, Any], Any]:
    return lambda x, y: lax.dot_general(x, y, (contract, batch), **options)


def _conv(layout: str = "NHWC", kernel: str = "HWIO", **options: Any) -> Callable[[Any, Any], Any]:
    chosen = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=(layout, kernel, layout), **chosen)


def _sum(name: str, fn: Callable[..., Any], *args: Arg, grad: bool = True) -> Case:
    return Case(name, fn, args, grad, "sum")


_DOTS = [
    *over_dtypes("matmul", jnp.matmul, Arg((130, 40)), Arg((40, 257)), grad=True, tolerance="sum"),
    _sum("matmul-130x257x65", jnp.matmul, Arg((130, 257)), Arg((257, 65))),
    _sum("matmul-accumulated-f32", _dot(((1,), (0,)), preferred_element_type=np.float32), Arg((33, 40), F16), Arg((40, 9), F16)),
    *[_sum(f"matmul-{word}", functools.partial(jnp.matmul, precision=word), Arg((13, 40)), Arg((40, 9))) for word in ("high", "highest")],
    _sum(
        "dot-algorithm-bfloat16",
        functools.partial(lax.dot, precision=lax.DotAlgorithmPreset.BF16_BF16_F32),
        Arg((13, 40), BF16),
        Arg((40, 9), BF16),
    ),
    _sum("dot-vector-vector", jnp.dot, Arg((130,)), Arg((130,))),
    _sum("dot-matrix-vector", jnp.dot, Arg((33, 130)), Arg((130,))),
    _sum("dot-transposed", _dot(((0,), (1,))), Arg((33, 9)), Arg((7, 33))),
    _sum("dot-two-axes", _dot(((1, 2), (2, 0))), Arg((5, 7, 9)), Arg((9, 4, 7))),
    _sum("dot-batch", _dot(((2,), (1,)), ((0,), (0,))), Arg((5, 13, 9)), Arg((5, 9, 7))),
    _sum("dot-batch-inside", _dot(((3,), (3,)), ((0, 2), (0, 2))), Arg((2, 13, 3, 9)), Arg((2, 11, 3, 9))),
    _sum("dot-outer", jnp.outer, Arg((33,)), Arg((9,))),
    *over_dtypes("dot-matrices-vectors", _dot(((1,), (1,)), ((0,), (0,))), Arg((5, 40, 13)), Arg((5, 40)), grad=True, tolerance="sum"),
    _sum("dot-vectors-inside", _dot(((0,), (1,)), ((1, 3), (2, 0))), Arg((40, 5, 13, 3)), Arg((3, 40, 5))),
    _sum("dot-outer-batch-inside", _dot(((), ()), ((1,), (1,))), Arg((9, 2), BF16), Arg((7, 2), BF16)),
    _sum("dot-contract-of-one", jnp.matmul, Arg((33, 1)), Arg((1, 9))),
    _sum("ragged_dot", lambda x, y: lax.ragged_dot(x, y, np.array([4, 0, 7], np.int32)), Arg((13, 5)), Arg((3, 5, 6))),
    _sum("dot-empty-contraction", jnp.matmul, Arg((5, 0)), Arg((0, 7))),
    _sum("dot-empty-result", jnp.matmul, Arg((0, 5)), Arg((5, 7))),
    Case("dot-int32", jnp.matmul, (Arg((13, 33), S32), Arg((33, 7), S32)), False, "exact"),
    Case(
        "dot-int8-int32",
        _dot(((1,), (0,)), preferred_element_type=np.int32),
        (Arg((13, 33), S8, "bits"), Arg((33, 7), S8, "bits")),
        False,
        "exact",
    ),
    Case("dot-uint8", jnp.matmul, (Arg((13, 33), U8, "bits"), Arg((33, 7), U8, "bits")), False, "exact"),
    _sum("dot-int8-float", _dot(((1,), (0,)), preferred_element_type=np.float32), Arg((13, 33), S8), Arg((33, 7), S8), grad=False),
    _sum(
        "einsum-attention",
        lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v),
        *[Arg((2, 7, 3, 5))] * 3,
    ),
    _sum("dense-bias-relu", lambda x, w, b: nn.relu(x @ w + b), Arg((33, 13)), Arg((13, 10)), Arg((10,))),
    _sum("dense-chain-bf16", lambda x, w: jnp.tanh(x @ w), Arg((33, 13), BF16), Arg((13, 10), BF16), grad=False),
]
_CONVS = [
    *over_dtypes("conv-same", _conv(), Arg((2, 9, 7, 3)), Arg((3, 3, 3, 5)), grad=True, tolerance="sum"),
    _sum("conv-valid-5x5", _conv(padding="VALID"), Arg((2, 14, 14, 1)), Arg((5, 5, 1, 6))),
    _sum("conv-nchw", _conv("NCHW", "OIHW", padding="VALID"), Arg((2, 3, 9, 8)), Arg((4, 3, 3, 2))),
    _sum("conv-strided", _conv(window_strides=(2, 3), padding=((1, 2), (0, 1))), Arg((2, 11, 10, 3)), Arg((3, 4, 3, 5))),
    _sum("conv-dilated-kernel", _conv(rhs_dilation=(2, 3)), Arg((1, 12, 11, 2)), Arg((3, 2, 2, 3))),
    _sum("conv-dilated-image", _conv(lhs_dilation=(2, 2), padding=((2, 1), (1, 2))), Arg((1, 5, 6, 2)), Arg((3, 3, 2, 3))),
    _sum("conv-1x1", _conv(), Arg((2, 7, 5, 4)), Arg((1, 1, 4, 3))),
    _sum("conv-1x1-strided", _conv(window_strides=(2, 2)), Arg((2, 7, 5, 4)), Arg((1, 1, 4, 3))),
    _sum("conv-whole-image", _conv(padding="VALID"), Arg((2, 6, 5, 3)), Arg((6, 5, 3, 4))),
    _sum("conv-feature-groups", _conv(feature_group_count=2), Arg((2, 7, 5, 4)), Arg((3, 3, 2, 6))),
    _sum("conv-depthwise", _conv(feature_group_count=4), Arg((2, 7, 5, 4)), Arg((3, 3, 1, 4))),
    _sum("conv-depthwise-doubling", _conv(feature_group_count=3, window_strides=(2, 2)), Arg((2, 7, 5, 3)), Arg((3, 3, 1, 6))),
    _sum("conv-batch-groups", _conv(batch_group_count=2), Arg((4, 7, 5, 3)), Arg((3, 3, 3, 6))),
    _sum(
        "conv-1d",
        lambda x, w: lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        Arg((2, 17, 3)),
        Arg((4, 3, 5)),
    ),
    _sum(
        "conv-3d",
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")),
        Arg((1, 4, 5, 3, 2)),
        Arg((2, 3, 2, 2, 3)),
    ),
    _sum("conv-transpose", lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), Arg((1, 5, 4, 3)), Arg((3, 3, 3, 2))),
    _sum(
        "conv-no-spatial",
        lambda x, w: lax.conv_general_dilated(x, w, (), (), dimension_numbers=lax.ConvDimensionNumbers((0, 1), (0, 1), (0, 1))),
        Arg((5, 3)),
        Arg((4, 3)),
    ),
    Case(
        "conv-int8",
        lambda x, w: _conv(preferred_element_type=np.int32)(x, w),
        (Arg((1, 6, 6, 2), S8), Arg((3, 3, 2, 3), S8)),
        False,
        "exact",
    ),
    _sum("conv-cropped", _conv(window_strides=(2, 1), padding=((-1, 2), (1, -2))), Arg((2, 9, 10, 3)), Arg((3, 2, 3, 4))),
    _sum("conv-strided-by-three", _conv(window_strides=(3, 2)), Arg((1, 11, 9, 2)), Arg((5, 3, 2, 4))),
    _sum("conv-transpose-wide", lambda x, w: lax.conv_transpose(x, w, (3, 2), "VALID"), Arg((1, 4, 5, 2)), Arg((2, 5, 2, 3))),
    _sum("conv-depthwise-strided", _conv(feature_group_count=4, window_strides=(2, 2)), Arg((1, 8, 7, 4)), Arg((3, 3, 1, 4))),
    _sum("conv-bias-relu", lambda x, w, b: nn.relu(_conv()(x, w) + b), Arg((2, 7, 6, 3)), Arg((3, 3, 3, 5)), Arg((5,))),
    _sum("conv-accumulated-f32", _conv(preferred_element_type=np.float32), Arg((1, 7, 7, 3), F16), Arg((3, 3, 3, 4), F16), grad=False),
    _sum(
        "conv-3d-strided",
        lambda x, w: lax.conv_general_dilated(x, w, (2, 1, 2), "VALID", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")),
        Arg((1, 5, 4, 6, 2)),
        Arg((2, 2, 3, 2, 3)),
    ),
    _sum("conv-empty", _conv(), Arg((0, 7, 5, 4)), Arg((3, 3, 4, 2))),
]


def _max_pool(window: Any, strides: Any, padding: Any, x: Any) -> Any:
    return nn.max_pool(x, window, strides, padding)


_POOLS = [
    *over_dtypes(
        "max_pool-2x2",
        lambda x: nn.max_pool(x, (2, 2), (2, 2)),
        Arg((2, 9, 8, 3), F32, "distinct"),
        dtypes=(F32, F16),
        grad=True,
        tolerance="exact",
    ),
    Case("max_pool-ties", lambda x: nn.max_pool(x, (2, 2), (2, 2)), (Arg((2, 8, 8, 3), F32, "ties"),), True, "exact"),
    Case("max_pool-overlapping", lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), (Arg((2, 9, 8, 3), F32, "distinct"),), True, "exact"),
    Case(
        "max_pool-padded-ties", lambda x: nn.max_pool(x, (3, 2), (1, 2), ((1, 1), (1, 0))), (Arg((1, 7, 8, 2), F32, "ties"),), True, "exact"
    ),
    Case(
        "max_pool-infinities",
        lambda x: nn.max_pool(jnp.where(x < 0, -jnp.inf, x), (2, 2), (2, 2), "SAME"),
        (Arg((1, 7, 7, 2), F32),),
        True,
        "exact",
    ),
    Case(
        "min_pool",
        lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (Arg((2, 9, 8, 3), F32, "distinct"),),
        True,
        "exact",
    ),
    *over_dtypes("avg_pool", lambda x: nn.avg_pool(x, (2, 3), (2, 2), "SAME"), Arg((2, 9, 8, 3)), grad=True, tolerance="sum"),
    _sum("avg_pool-uncounted-padding", lambda x: nn.avg_pool(x, (3, 3), (1, 1), "SAME", count_include_pad=False), Arg((1, 6, 5, 2))),
    _sum("avg_pool-whole-image", lambda x: nn.avg_pool(x, (9, 8)), Arg((2, 9, 8, 3))),
    *(
        Case(
            f"max_pool-{name}",
            functools.partial(_max_pool, *geometry),
            (Arg(shape, F32, domain),),
            True,
            "exact" if geometry[0] == geometry[1] else "sum",
        )
        for name, shape, domain, geometry in (
            ("resnet", (2, 10, 9, 3), "ties", ((3, 3), (2, 2), ((1, 1), (1, 1)))),
            ("nan", (1, 9, 9, 2), "edges", ((3, 3), (2, 2), ((1, 1), (1, 0)))),
            ("nan-side-by-side", (1, 9, 8, 2), "edges", ((2, 2), (2, 2), "SAME")),
            ("stride-one", (1, 6, 5, 2), "ties", ((3, 2), (1, 1), "SAME")),
            ("gaps", (1, 9, 11, 2), "ties", ((2, 1), (3, 4), "VALID")),
            ("one-window", (1, 2, 2, 3), "ties", ((2, 2), (2, 2), "VALID")),
            ("1d", (2, 13, 3), "ties", ((4,), (3,), ((2, 1),))),
            ("3d", (1, 5, 6, 4, 2), "ties", ((2, 3, 2), (2, 2, 1), "SAME")),
        )
    ),
    Case("max_pool-one-window-of-work", lambda x: nn.max_pool(jnp.sin(x), (2, 2), (2, 2)), (Arg((2, 2, 2, 5)),), True, "composed"),
    Case("avg_pool-3d", lambda x: nn.avg_pool(x, (2, 2, 2), (2, 1, 2), "SAME"), (Arg((1, 5, 4, 4, 2)),), True, "sum"),
    Case("avg_pool-gaps", lambda x: nn.avg_pool(x, (2, 2), (3, 3)), (Arg((1, 9, 8, 2)),), True, "sum"),
    Case("avg_pool-large", lambda x: nn.avg_pool(x, (7, 7), (2, 3), "SAME"), (Arg((1, 9, 8, 2)),), True, "sum"),
    Case(
        "reduce_window-spread-and-dilated",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 2), (1, 1), ((2, 1), (0, 3)), (2, 3), (2, 1)),
        (Arg((6, 5)),),
        True,
        "sum",
    ),
    Case(
        "max_pool-int32",
        lambda x: lax.reduce_window(x, np.int32(-(2**31)), lax.max, (2, 2), (1, 1), "VALID"),
        (Arg((9, 7), S32),),
        False,
        "exact",
    ),
    Case(
        "reduce_window-dilated",
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 3), (2, 1), ((1, 0), (0, 1)), (2, 1), (2, 2)),
        (Arg((9, 11)),),
        False,
        "exact",
    ),
    Case(
        "reduce_window-prefix-sums",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (33, 1), (1, 1), ((32, 0), (0, 0))),
        (Arg((33, 5)),),
        True,
        "sum",
    ),
    Case(
        "reduce_window-suffix-sums",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 33), (1, 1), ((0, 0), (0, 32))),
        (Arg((5, 33)),),
        False,
        "sum",
    ),
    Case(
        "reduce_window-padded-as-prefixes-but-dilated",
        lambda x: (
            lax.reduce_window(x, -np.inf, lax.max, (1, 3), (1, 1), ((0, 0), (2, 0)), window_dilation=(1, 2)),
            lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), ((0, 0), (0, 4)), window_dilation=(1, 3)),
        ),
        (Arg((5, 3)),),
        False,
        "sum",
    ),
    Case("reduce_window-of-a-scalar", lambda x: lax.reduce_window(x, 0.0, lax.add, (), ()), (Arg(()),), True, "sum"),
    Case("reduce_window-long", lambda x: lax.reduce_window(x, 0.0, lax.add, (40,), (30,), "VALID"), (Arg((130,)),), True, "sum"),
    Case(
        "reduce_window-product",
        lambda x: lax.reduce_window(x, np.float32(2), lax.mul, (3,), (2,), "VALID"),
        (Arg((33,), F32, "positive"),),
        False,
        "composed",
    ),
    Case(
        "max_pool-tangent",
        lambda x, t: jnp.stack(_jvp(lambda y: nn.max_pool(y, (2, 2), (2, 2)), x, t)),
        (Arg((1, 6, 6, 2), F32, "distinct"), Arg((1, 6, 6, 2))),
        False,
        "exact",
    ),
]


def _jvp(fn: Callable[[Any], Any], x: Any, tangent: Any) -> Any:
    return jax.jvp(fn, (x,), (tangent,))


CASES = [*_DOTS, *_CONVS, *_POOLS]
