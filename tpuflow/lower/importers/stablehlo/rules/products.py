"""Rules of products: contractions and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.products import DEFAULT, PRECISIONS
from tpuflow.lower.importers.stablehlo.walk import RULES
from tpuflow.lower.operations.convolution import ConvAxes, convolution
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.products import dot_general
from tpuflow.lower.operations.window import Padding, Sizes, SlidingWindow

_ALGORITHMS = {
    ("bf16", "f32", 1): DEFAULT, ("bf16", "f32", 3): "high", ("bf16", "f32", 6): "highest", ("f32", "f32", 1): "highest",
}  # fmt: skip
"""(type that f32 operands are split into, type of sums, products of such parts) -> the graph's word."""


@RULES.lowers("stablehlo.dot_general")
def _dot_general(
    b: Builder, lhs: Value, rhs: Value, *, dot_dimension_numbers: Any, types: tuple[TensorType],
    precision_config: Sequence[str] = (), algorithm: Any = None,
) -> Value:  # fmt: skip
    d = dot_dimension_numbers
    return dot_general(
        b, lhs, rhs, lhs_contract=d.lhs_contracting_dimensions, rhs_contract=d.rhs_contracting_dimensions,
        lhs_batch=d.lhs_batching_dimensions, rhs_batch=d.rhs_batching_dimensions,
        precision=_precision(precision_config, algorithm), preferred=types[0].dtype,
    )  # fmt: skip


@RULES.lowers("stablehlo.dot")
def _dot(b: Builder, lhs: Value, rhs: Value, *, types: tuple[TensorType], precision_config: Sequence[str] = ()) -> Value:
    """The last axis of lhs meets the first of rhs."""
    return dot_general(
        b, lhs, rhs, lhs_contract=(len(lhs.shape) - 1,), rhs_contract=(0,), precision=_precision(precision_config, None),
        preferred=types[0].dtype,
    )  # fmt: skip


@RULES.lowers("stablehlo.convolution")
def _convolution(
    b: Builder, lhs: Value, rhs: Value, *, dimension_numbers: Any, types: tuple[TensorType], feature_group_count: int,
    batch_group_count: int, window_strides: Sizes = (), padding: Any = None, lhs_dilation: Sizes = (), rhs_dilation: Sizes = (),
    window_reversal: Sequence[bool] = (), precision_config: Sequence[str] = (),
) -> Value:  # fmt: skip
    d = dimension_numbers
    kernel = list(d.kernel_spatial_dimensions)
    turned = b.reverse(rhs, [axis for axis, turn in zip(kernel, window_reversal, strict=False) if turn])
    pads: Padding = [(0, 0)] * len(kernel) if padding is None else padding.tolist()
    sizes = [rhs.shape[i] for i in kernel]
    places = ConvAxes(
        (d.input_batch_dimension, d.input_feature_dimension, *d.input_spatial_dimensions),
        (d.kernel_output_feature_dimension, d.kernel_input_feature_dimension, *kernel),
        (d.output_batch_dimension, d.output_feature_dimension, *d.output_spatial_dimensions),
    )
    return convolution(
        b, lhs, turned, places, SlidingWindow.of(sizes, window_strides or (1,) * len(kernel), pads, lhs_dilation, rhs_dilation),
        feature_groups=feature_group_count, batch_groups=batch_group_count, precision=_precision(precision_config, None),
        preferred=types[0].dtype,
    )  # fmt: skip


def _precision(config: Sequence[str], algorithm: Any) -> str:
    """The graph's word for the operands' precisions, of which the higher counts, or for an algorithm.

    Raises:
      UnsupportedForm: an algorithm that the matrix unit does not have.
    """
    if algorithm is None:
        return max((word.lower() for word in config), key=PRECISIONS.index, default=DEFAULT)
    word = _ALGORITHMS.get((str(algorithm.lhs_precision_type), str(algorithm.accumulation_type), algorithm.num_primitive_operations))
    if word is None or str(algorithm.lhs_precision_type) != str(algorithm.rhs_precision_type):
        raise UnsupportedForm(f"the algorithm {algorithm}; use precision DEFAULT, HIGH or HIGHEST")
    return word
