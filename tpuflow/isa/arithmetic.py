"""The device's arithmetic: the protocol that instruction meanings are written against.

Two implementations compute the same bits: `NumpyArithmetic` (`tpuflow.isa.numpy_arithmetic`, for the reference engine) and
`LaxArithmetic(bitexact=True)` (`tpuflow.device.fast.arithmetic`). `docs/numerics.md` states the rules with their measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tpuflow.dtypes import DType
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.numpy_arithmetic import NumpyArithmetic

__all__ = ["Arithmetic", "NumpyArithmetic"]

Shape = tuple[int, ...]


class Arithmetic(Protocol):
    """What the vector, scalar and matrix units can do with values of valid (not padded) shape.

    A value is an array in the implementation's own form, the carrier: `load` makes one from a stored array and `store` turns it
    back. Every method returns values that are rounded to their dtype, NaN results being the canonical quiet NaN.

    f32 and bf16 arithmetic (unary except neg and abs, binary, compare, reduce, cumulative, matmul, sort keys, conversion to pred)
    reads subnormals as zeros of the same sign and writes zeros for them; f16 keeps subnormals. Moves, bit operations, neg, abs,
    is_finite, select, bitcast, broadcast, transpose, and conversions between f32 and bf16 keep them.
    """

    def load(self, stored: Any, dtype: DType) -> Any:
        """The carrier form of an array stored as `dtype`."""
        ...

    def store(self, value: Any, dtype: DType) -> Any:
        """The array to store, of `dtype`'s own type."""
        ...

    def full(self, shape: Shape, value: int | float | bool, dtype: DType) -> Any:
        """`value`, rounded to `dtype`, everywhere."""
        ...

    def iota(self, shape: Shape, axis: int, start: Any, dtype: DType) -> Any:
        """start, start + 1, ... along `axis`; start is an integer (traced or not). Integers wrap; floats round from s32."""
        ...

    def unary(self, op: str, a: Any, dtype: DType) -> Any:
        """`op` of `isa.elementwise.UNARY`: the exact result, rounded once."""
        ...

    def is_finite(self, a: Any, dtype: DType) -> Any:
        """pred: neither infinite nor NaN (integers are finite)."""
        ...

    def binary(self, op: str, a: Any, b: Any, dtype: DType) -> Any:
        """`op` of `isa.elementwise.BINARY` on operands of one shape and type: the exact result, rounded once.

        max and min hand on NaN and hold +0 above -0. rem has the dividend's sign (C's fmod). Integers wrap; x / 0 is all ones,
        x rem 0 is x, INT_MIN / -1 is INT_MIN with remainder 0. Shifting by the width or more gives 0 (copies of the sign for
        shr_arithmetic). mulhi is the high half of the double-width product.
        """
        ...

    def compare(self, op: str, a: Any, b: Any, dtype: DType) -> Any:
        """pred: a `op` b, `op` of `isa.elementwise.COMPARE`, operands of `dtype`; with NaN all are false but ne."""
        ...

    def select(self, pred: Any, on_true: Any, on_false: Any, dtype: DType) -> Any:
        """Bits of on_true where pred, else of on_false; all of one shape."""
        ...

    def convert(self, a: Any, from_dtype: DType, to_dtype: DType) -> Any:
        """Nearest even to floats; float to integer truncates and saturates, NaN gives 0; integers wrap; to pred is `!= 0`."""
        ...

    def bitcast(self, a: Any, from_dtype: DType, to_dtype: DType) -> Any:
        """The same bits as another type of the same width."""
        ...

    def broadcast(self, a: Any, shape: Shape, axes: Sequence[int]) -> Any:
        """Axis i of `a` along axis `axes[i]` of `shape`; sizes 1 are repeated."""
        ...

    def transpose(self, a: Any, permutation: Sequence[int]) -> Any:
        """Axis i of the result is axis `permutation[i]` of `a`."""
        ...

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        """Values one after the other along `axis`."""
        ...

    def reduce(self, op: str, start: Any, a: Any, axes: Sequence[int], block: int, dtype: DType) -> Any:
        """`op` of `isa.elementwise.REDUCE` over ascending `axes`, of size 1 in `start` and in the result, every step rounded to `dtype`.

        What lies along the axes, row-major, is cut into blocks of `block` elements, the last perhaps shorter. Each is padded with the
        identity to a power of two, then the lower half combined with the upper half until one is left. Blocks are combined with
        `start` one after the other.
        """
        ...

    def cumulative(self, op: str, carry: Any, a: Any, axis: int, dtype: DType) -> tuple[Any, Any]:
        """(values, last value): values[j] = op(values[j - 1], a[j]) left to right, values[-1] being `carry` (size 1 on `axis`)."""
        ...

    def sort(self, operands: Sequence[Any], dtypes: Sequence[DType], axis: int, keys: int, count: int) -> tuple[Any, ...]:
        """The first `count` of all operands in the order along `axis` of the first `keys`: stable, ascending, -0 equal to 0, NaN last."""
        ...

    def patches(self, a: Any, axis: int, outer: int, inner: int, stride: int, dilation: int) -> Any:
        """`axis` replaced by two axes of the given lengths: element (i, r) of them is element i * stride + r * dilation of it."""
        ...

    def positions(self, shape: Shape, axis: int) -> Any:
        """0, 1, ... along `axis`: s32, repeated along the other axes of `shape`."""
        ...

    def matmul(
        self, a: Any, b: Any, contraction: Contraction, dtype: DType, acc_dtype: DType, a_mask: Any = None, b_mask: Any = None
    ) -> Any:
        """The product of one K-tile, no axis of which slides: operands of `dtype`, result of `acc_dtype` (f32 or s32).

        Float products are summed in float64 in ascending order of the contracted positions (row-major in a's axis order) and rounded
        once to f32. Integers sum modulo 2^32.

        a_mask, b_mask: pred of the operands' ranks, axes of size 1 broadcast; false where an operand has padding, whose zeros take part in
        no product (0 * infinity there is no NaN). None: no padding.
        """
        ...
