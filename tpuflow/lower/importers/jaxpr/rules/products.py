"""Rules of products: contractions and convolutions."""

from __future__ import annotations

from typing import Any

from tpuflow.dtypes import BF16, F16, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.graph.products import DEFAULT, PRECISIONS
from tpuflow.lower.importers.jaxpr.registry import lowers
from tpuflow.lower.operations.convolution import ConvAxes, convolution
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.products import dot_general
from tpuflow.lower.operations.window import Padding, Sizes, SlidingWindow

_PRECISIONS = {
    "DEFAULT": "default", "HIGH": "high", "HIGHEST": "highest",
    "BF16_BF16_F32_X3": "high", "BF16_BF16_F32_X6": "highest", "F32_F32_F32": "highest",
    "BF16_BF16_F32": "default", "F16_F16_F32": "default",
}  # fmt: skip
_ENTERING = {"BF16_BF16_F32": BF16, "F16_F16_F32": F16}
"""DotAlgorithmPreset -> the type to which its operands are rounded."""


@lowers("dot_general")
def _dot_general(
    b: Builder, lhs: Value, rhs: Value, *,
    dimension_numbers: tuple[tuple[Sizes, Sizes], tuple[Sizes, Sizes]], precision: Any, preferred_element_type: Any,
) -> Value:  # fmt: skip
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    return dot_general(
        b, lhs, rhs, lhs_contract=lhs_contract, rhs_contract=rhs_contract, lhs_batch=lhs_batch, rhs_batch=rhs_batch,
        precision=_precision(precision), preferred=_dtype(preferred_element_type), entering=_ENTERING.get(getattr(precision, "name", "")),
    )  # fmt: skip


@lowers("conv_general_dilated")
def _conv_general_dilated(
    b: Builder, lhs: Value, rhs: Value, *,
    window_strides: Sizes, padding: Padding, lhs_dilation: Sizes, rhs_dilation: Sizes, dimension_numbers: Any,
    feature_group_count: int, batch_group_count: int, precision: Any, preferred_element_type: Any,
) -> Value:  # fmt: skip
    sizes = [rhs.shape[i] for i in dimension_numbers.rhs_spec[2:]]
    return convolution(
        b, lhs, rhs, ConvAxes(*dimension_numbers), SlidingWindow.of(sizes, window_strides, padding, lhs_dilation, rhs_dilation),
        feature_groups=feature_group_count, batch_groups=batch_group_count,
        precision=_precision(precision), preferred=_dtype(preferred_element_type),
    )  # fmt: skip


def _dtype(given: Any) -> DType | None:
    return None if given is None else dtype_of(given)


def _precision(precision: Any) -> str:
    """The graph's word for JAX's `precision`, which may be one for each operand (the higher counts) or a `DotAlgorithmPreset`.

    Raises:
      UnsupportedForm: an algorithm that the matrix unit does not have.
    """
    given = precision if isinstance(precision, tuple) else (precision,)
    words = [getattr(one, "name", str(one)) for one in given if one is not None]
    unknown = [word for word in words if word not in _PRECISIONS]
    if unknown:
        raise UnsupportedForm(f"precision {unknown[0]}; there are: {', '.join(_PRECISIONS)}")
    return max((_PRECISIONS[word] for word in words), key=PRECISIONS.index, default=DEFAULT)
