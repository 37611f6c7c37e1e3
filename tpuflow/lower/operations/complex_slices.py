"""Changes of slices of complex arrays that are not the same in both planes."""

from __future__ import annotations

import math

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.complex import Complex, mul
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.rows import SliceAxes
from tpuflow.lower.operations.scatter import scatter


def multiply_slice(b: Builder, operand: Complex, indices: Value, updates: Complex, axes: SliceAxes, *, clip: bool) -> Complex:
    """The operand with one slice multiplied by the updates; dropped, or moved (`clip`), if it does not lie within.

    Raises:
      UnsupportedForm: there are several slices, which might meet.
    """
    if math.prod(indices.shape[:-1]) != 1:
        raise UnsupportedForm("complex numbers multiplied at several places; instead of x.at[i].multiply(y) write x.at[i].set(x[i] * y)")
    taken = iter(updates.shape[axis] for axis in axes.window)
    sizes = [1 if axis in axes.removed else next(taken) for axis in range(len(operand.shape))]
    old = Complex(*(gather(b, plane, indices, axes, sizes) for plane in (operand.real, operand.imag)))
    new = mul(b, old, updates)
    pairs = ((operand.real, new.real), (operand.imag, new.imag))
    return Complex(*(scatter(b, plane, indices, values, axes, "set", clip=clip) for plane, values in pairs))
