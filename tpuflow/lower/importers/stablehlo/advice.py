"""Advice for unsupported StableHLO operations: that of a corresponding JAX primitive, or a sentence of this file."""

from __future__ import annotations

from tpuflow.lower.importers.advice import advice as advice_on_primitive

_LIKE = {
    "eig": ("custom_call lapack_", "custom_call cusolver"),
    "ffi_call": ("custom_call xla_ffi_python", "custom_call xla_python", "custom_call xla_ffi_partitioned_python", "stablehlo.send",
                      "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"),
    "rng_uniform": ("stablehlo.rng", "custom_call cu_threefry2x32"),
    "pallas_call": ("custom_call tpu_custom_call", "custom_call triton", "custom_call __gpu", "custom_call mosaic", "custom_call __cudnn"),
    "psend": ("stablehlo.cross-replica-sum", "sdy."),
    "dim_as_value": ("stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_conv", "stablehlo.dynamic_gather", "stablehlo.dynamic_iota",
                     "stablehlo.dynamic_pad", "stablehlo.dynamic_reshape", "stablehlo.get_dimension_size", "stablehlo.real_dynamic_slice",
                     "stablehlo.set_dimension_size"),
}  # fmt: skip
"""JAX primitive -> prefixes of the names of operations (and custom call targets) to which its advice applies."""

_OTHERS = {
    "It orders effects or carries several values at once, which JAX does not need. Instead, return arrays": (
        "stablehlo.tuple", "stablehlo.get_tuple_element", "stablehlo.async_start",
        "stablehlo.async_done",
    ),
    "It is an operation of StableHLO's past. Instead, use stablehlo.broadcast_in_dim, dot_general and gather": (
        "stablehlo.broadcast", "stablehlo.einsum", "stablehlo.unary_einsum", "stablehlo.torch_index_select",
    ),
    "It is a layer whole, which JAX writes out. Instead, write mean, variance and scale with arithmetic": (
        "stablehlo.batch_norm_training", "stablehlo.batch_norm_inference", "stablehlo.batch_norm_grad",
    ),
    "It is of quantised types, which the device does not have. Instead, keep integers and scales as arrays": (
        "stablehlo.uniform_quantize", "stablehlo.uniform_dequantize",
    ),
    "It is a form of CHLO that JAX does not emit. Instead, use the StableHLO operation on arrays of one shape": (
        "chlo.broadcast_", "chlo.constant", "chlo.is_inf", "chlo.is_neg_inf", "chlo.is_pos_inf", "chlo.scan",
        "chlo._asin_acos_kernel",
    ),
    "It is a product of groups of rows whose lengths the data say. Instead, export for platforms=['cpu'], where JAX writes it out": (
        "chlo.ragged_dot",
    ),
}  # fmt: skip
"""Advice -> prefixes of the names of operations to which it applies."""


def advice(operation: str) -> str:
    """The advice for an unsupported operation."""
    for primitive, beginnings in _LIKE.items():
        if operation.startswith(beginnings):
            return advice_on_primitive(primitive)
    for sentence, beginnings in _OTHERS.items():
        if operation.startswith(beginnings):
            return f"{sentence}."
    return UNKNOWN


UNKNOWN = "Write it with other functions of jax.numpy, or add a rule to tpuflow/lower/importers/stablehlo/rules/."
"""The advice on an operation that is in none of the tables."""
