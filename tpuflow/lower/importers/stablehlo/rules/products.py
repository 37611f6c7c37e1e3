"""Rules of products: contractions and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import BF16, F16, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.products import DEFAULT, PRECISIONS
from tpuflow.lower.importers.stablehlo.walk import RULES
from tpuflow.lower.operations.convolution import ConvAxes, convolution
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.products import dot_general
from tpuflow.lower.operations.window import Padding, Sizes, SlidingWindow

_Way = tuple[str, DType | None]
_ALGORITHMS: dict[tuple[str, int], _Way] = {
    ("bf16", 1): (DEFAULT, BF16), ("f16", 1): (DEFAULT, F16), ("bf16", 3): ("high", None), ("bf16", 6): ("highest", None),
    ("f32", 1): ("highest", None),
}  # fmt: skip
"""(type that operands are rounded to or split into, products of such parts) -> the graph's word, and the type to round them to."""


@RULES.lowers("stablehlo.dot_general")
def _dot_general(
    b: Builder, lhs: Value, rhs: Value, *, dot_dimension_numbers: Any, types: tuple[TensorType],
    precision_config: Sequence[str] = (), algorithm: Any = None,
) -> Value:  # fmt: skip
    d = dot_dimension_numbers
    precision, entering = (_precision(precision_config), None) if algorithm is None else _way(algorithm)
    return dot_general(
        b, lhs, rhs, lhs_contract=d.lhs_contracting_dimensions, rhs_contract=d.rhs_contracting_dimensions,
        lhs_batch=d.lhs_batching_dimensions, rhs_batch=d.rhs_batching_dimensions,
        precision=precision, preferred=types[0].dtype, entering=entering,
    )  # fmt: skip


@RULES.lowers("stablehlo.dot")
def _dot(b: Builder, lhs: Value, rhs: Value, *, types: tuple[TensorType], precision_config: Sequence[str] = ()) -> Value:
    """The last axis of lhs meets the first of rhs."""
    return dot_general(
        b, lhs, rhs, lhs_contract=(len(lhs.shape) - 1,), rhs_contract=(0,), precision=_precision(precision_config),
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
        feature_groups=feature_group_count, batch_groups=batch_group_count, precision=_precision(precision_config),
        preferred=types[0].dtype,
    )  # fmt: skip


def _precision(config: Sequence[str]) -> str:
    """The graph's word for the operands' precisions, of which the higher counts."""
    return max((word.lower() for word in config), key=PRECISIONS.index, default=DEFAULT)


def _way(algorithm: Any) -> _Way:
    """The graph's word for an algorithm, and the type that operands are rounded to, if they are.

    Raises:
      UnsupportedForm: an algorithm that the matrix unit does not have.
    """
    lhs, rhs, sums = (str(getattr(algorithm, f"{name}_type")) for name in ("lhs_precision", "rhs_precision", "accumulation"))
    way = _ALGORITHMS.get((lhs, algorithm.num_primitive_operations))
    if way is None or lhs != rhs or sums != "f32":
        raise UnsupportedForm(f"the algorithm {algorithm}; use precision DEFAULT, HIGH or HIGHEST")
    return way
