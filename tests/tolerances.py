"""Every tolerance of the test suite, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """How far from the device's exact bits, in units in the last place of the result, and why that is not 0."""

    ulps: int
    reason: str


_XLA = "XLA:CPU's own f32 function; measured over 3 x 10^6 random and special values: "

# Native fidelity, one instruction, f32. Every operation that is not named rounds once, as the device does: 0.
# f16 and bf16 compute the f32 function and round it once more: at most 1 for all of them.
NATIVE_F32 = {
    "rsqrt": Bound(3, _XLA + "2 (1 / sqrt(x) in two roundings)"),
    "cbrt": Bound(2, _XLA + "1"),
    "exp": Bound(7, _XLA + "5, close to overflow"),
    "expm1": Bound(8, _XLA + "6"),
    "log": Bound(2, _XLA + "1"),
    "log1p": Bound(3, _XLA + "2"),
    "tanh": Bound(6, _XLA + "4 (a rational function, exact +-1 from |x| = 7.99 on)"),
    "sin": Bound(2, _XLA + "1"),
    "cos": Bound(2, _XLA + "1"),
    "erf": Bound(8, _XLA + "5"),
    "pow": Bound(2, _XLA + "1"),
    "atan2": Bound(2, _XLA + "1"),
}
NATIVE_SHORT_SPECIAL = Bound(1, "one more rounding of an f32 result a few ulps of f32 off: it can only fall on the neighbour")

# Sums in any order: |error| <= n u sum|terms| for each of two orders, u = 2^-24 in f32 (Higham, Accuracy and Stability, 4.2).
F32_UNIT = 2.0**-24


def sum_bound(terms: int) -> float:
    """How much two orders of adding `terms` f32 numbers may differ, as a share of the sum of their magnitudes."""
    return 2 * terms * F32_UNIT


# Ten training steps of the MNIST MLP: largest difference of a parameter over its tensor's largest magnitude. Empirical: rounding
# differences of one step feed the next, so nothing is derived; each bound is a few times what was measured against bit-exact.
# Plain jax.jit of the same step is held to the same bounds.
TEN_STEPS = {
    "fp32": 1e-6,  # measured 1e-7: the order of f32 sums
    "fp16": 2e-3,  # measured 4e-4: half a unit in the last place of fp16, where a sum falls on the other side of a tie
    "mixed": 1e-3,  # measured 8e-5: fp16 gradients, one unit apart, scaled by the learning rate
    "bf16": 8e-3,  # measured 1e-4: at most one unit in the last place of bf16
    "mixed_bf16": 1e-3,  # measured 1e-5: bf16 gradients, one unit apart, scaled by the learning rate
}


@dataclass(frozen=True)
class StepBound:
    """How far one training step may be from float64: relative errors by the Euclidean norm; `gradients`: the worst tensor's."""

    logits: float
    loss: float
    statistics: float
    gradients: float


# A step of ResNet-50, batch 4 at 64x64, every block's last scale 1/4. Empirical: twice what was measured, or a little more. A logit takes
# errors from 53 layers that each round to 11 bits (8 in bf16); rounding also moves ReLU inputs across zero and changes which pixel a
# maximum comes from, which switches whole paths of a gradient, so gradients are far less near than logits: 17 % in the median tensor in
# fp16. (In fp32 one such switch shows as 3e-4 to 5e-3 where there are 4e-6 without one, PyTorch's and plain JAX's included.) A gradient
# that is missing, or another one, has an error of 1 and more. O2 and O3 round what mixed rounds (measured for both 4.0e-3, 3.3e-4, 3.4e-3,
# 0.24) and are not run beside it.
RESNET50 = {
    "mixed": StepBound(6e-3, 5e-4, 6e-3, 0.45),  # measured 3.0e-3, 6.5e-6, 3.1e-3, 0.21
    "mixed_bf16": StepBound(6e-2, 8e-3, 6e-2, 0.9),  # measured 2.8e-2, 2.9e-3, 2.5e-2, 0.57
}

# Ten steps of a small network with convolutions and batch normalisation under O3, against the same in fp32: largest difference of a
# loss of about 1. Empirical: fp16 has a unit in the last place of 1e-3 there, and rounding differences of one step feed the next.
O3_LOSSES = 1e-2

# Three micro-batches against one batch of three times the size, four steps of a small network of values below 1 in fp32: two orders of
# summing a gradient, a unit in the last place or two each.
ACCUMULATION = 1e-6

# The same, one update of learning rate 0.2 with gradients of up to 1 in fp16: their rounding (2^-11 each, the mean's included).
ACCUMULATION_FP16 = 1e-3

# A step through three layers of width 16, f32, device bits against jax.jit's: sums of at most 16 terms, special functions at most
# 6 ulps off, some 20 operations deep, values of magnitude 1 to 10: 20 x 6 x 2^-24 is 7e-6.
SMALL_STEP = {"rtol": 1e-5, "atol": 1e-5}

# 24 steps of Adam on the tiny transformer, its losses (4.6 falling to 2.0) beside plain jax.jit's of the same step, relative. Empirical:
# rounding differences of one step feed the next.
TRANSFORMER_LOSSES = {
    "fp32": 1e-5,  # measured 4e-7: the order of f32 sums
    "mixed_bf16": 5e-3,  # measured 1.4e-3: a unit in the last place of bf16 is 4e-3 to 8e-3 of a value
}

# Batch normalisation in fp32 against its definition in float64, beside the largest value: sums of 240 values of a few deviations, and
# the rounding of inputs whose mean is 30 deviations (2^-24 x 30, twice).
NORM_VALUES = 5e-6

# The variance of samples around a mean of a thousand deviations, each rounded to 2^-14 (of 1000): that over the smallest deviation, 1.
NORM_STATISTICS = 1e-4

# A variance as the difference of plain squares, beside the squared mean: 2^-24 at each of the eight levels of a sum of 240, in the
# mean of squares and, twice over, in the square of the mean.
PLAIN_SQUARES = (8 + 2 * 8) * 2.0**-24

# Two layers of convolutions and batch normalisation in fp32, forward and backward, beside XLA's, over the largest value: other orders of
# sums of up to 288 products, divided by deviations, twice.
LAYER_STATISTICS = 2e-5

# weights of softmax in bf16, mixed, and three products of bf16 after them, of what is of order 1.
ATTENTION = 0.1
