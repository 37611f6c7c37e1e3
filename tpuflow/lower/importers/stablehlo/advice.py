"""What to do instead of a StableHLO operation that has no rule: each is like a primitive of JAX that has none."""

from __future__ import annotations

from tpuflow.lower.importers.advice import advice as advice_on_primitive

_LIKE = {
    "eig": ("custom_call lapack_", "custom_call cusolver"),
    "fft": ("stablehlo.fft",),
    "complex": ("stablehlo.complex", "stablehlo.real", "stablehlo.imag", "chlo.conj"),
    "pure_callback": ("custom_call xla_ffi_python", "custom_call xla_python", "custom_call xla_ffi_partitioned_python", "stablehlo.send",
                      "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"),
    "rng_uniform": ("stablehlo.rng", "custom_call cu_threefry2x32"),
    "pallas_call": ("custom_call tpu_custom_call", "custom_call triton", "custom_call __gpu", "custom_call mosaic", "custom_call __cudnn"),
    "ragged_dot_general": ("chlo.ragged_dot",),
    "psend": ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.all_to_all", "stablehlo.collective_broadcast",
              "stablehlo.collective_permute", "stablehlo.reduce_scatter", "stablehlo.partition_id", "stablehlo.replica_id", "sdy."),
    "dim_as_value": ("stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_conv", "stablehlo.dynamic_gather", "stablehlo.dynamic_iota",
                     "stablehlo.dynamic_pad", "stablehlo.dynamic_reshape", "stablehlo.get_dimension_size", "stablehlo.real_dynamic_slice",
                     "stablehlo.set_dimension_size"),
}  # fmt: skip
"""Primitive -> the beginnings of names of operations, and of targets of custom calls, for which the same advice holds."""


def advice(operation: str) -> str:
    """What an operation without a rule is and what to do instead, in a sentence or two."""
    for primitive, beginnings in _LIKE.items():
        if operation.startswith(beginnings):
            return advice_on_primitive(primitive)
    return "Write it with other functions of jax.numpy, or add a rule to tpuflow/lower/importers/stablehlo/rules/."
