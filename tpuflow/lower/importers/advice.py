"""Advice for unsupported primitives, by family: what they are, and what works instead. Part of the importer's error messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Primitives that are unsupported for one reason: what they are (`what`), and what works `instead`."""

    what: str
    instead: str
    primitives: tuple[str, ...]


ELSEWHERE = "compute it outside of the step, with plain jax.jit, and pass the result in as an argument or with the batch"

FAMILIES = (
    Family(
        "a matrix decomposition that TPUs do not have",
        f"use jnp.linalg.svd, eigh, qr, lu or cholesky, which run here; or {ELSEWHERE}",
        ("cholesky_update", "eig", "geqp3", "hessenberg", "schur", "spsolve", "symmetric_product", "tridiagonal"),
    ),
    Family(
        "a call of the host that is known to its compiler alone",
        "call a function of Python with jax.pure_callback or jax.experimental.io_callback, or do it before the step and pass the result in "
        "with the batch",
        ("ffi_call", "inspect_sharding"),
    ),
    Family(
        "a check at run time",
        "take it out of the step with jax.experimental.checkify.checkify, or leave it out",
        ("check", "shape_assertion"),
    ),
    Family(
        "a random number generator whose state the program does not see",
        "draw with jax.random from jax.random.key(seed)",
        ("rng_uniform",),
    ),
    Family(
        "a kernel written for another device",
        "use the same function written with jax.numpy (for attention: jax.nn.dot_product_attention with implementation='xla')",
        (
            "core_map", "cudnn_fusion", "custom_partitioning", "delay", "dot_product_attention_bwd", "dot_product_attention_bwd_wrapper",
            "dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper", "dot_product_attention_fp8_fwd",
            "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper",
            "masked_load", "masked_swap", "mpmd_map", "num_programs", "pallas_call", "program_id", "run_scoped", "scaled_dot",
            "scaled_matmul", "scaled_matmul_wrapper", "semaphore_read", "semaphore_signal", "semaphore_wait", "unreachable",
            "with_memory_space_constraint",
        ),
    ),
    Family(
        "communication between devices of a kind that chips here do not have",
        "use jax.lax.psum, pmean, pmax, all_gather, psum_scatter, all_to_all and ppermute inside of jax.shard_map, which they have",
        (
            "all_gather_done", "all_gather_reduced", "all_gather_reduced_start", "all_gather_start", "all_to_all_done", "all_to_all_start",
            "global_array_to_host_local_array", "host_local_array_to_global_array",
            "pbroadcast_done", "pbroadcast_start", "ppermute_done", "ppermute_start", "precv", "preduced", "psend", "psum_done",
            "psum_invariant_start", "psum_start", "ragged_all_to_all", "reduce_scatter_done", "reduce_scatter_start",
            "reduced_vary_cast_p", "unreduced_psum", "unreduced_psum_start", "unreduced_reduce_scatter",
            "unreduced_reduce_scatter_start", "vary_unreduced_cast_p",
        ),
    ),
    Family(
        "an array that is changed in place",
        "return the new array: x = x.at[i].set(y)",
        (
            "accum_grad_in_ref", "addupdate", "box_get", "box_set", "empty_ref", "free_ref", "freeze", "get", "get_global", "log_extend",
            "log_read", "new_box", "new_log", "new_ref", "pin", "run_state", "swap", "unpin",
        ),
    ),
    Family(
        "arithmetic of sparse arrays",
        "make them dense before the step (x.todense()), or select rows with jnp.take",
        (
            "bcoo_dot_general", "bcoo_dot_general_sampled", "bcoo_extract", "bcoo_fromdense", "bcoo_sort_indices", "bcoo_spdot_general",
            "bcoo_sum_duplicates", "bcoo_todense", "bcoo_transpose", "bcsr_dot_general", "bcsr_extract", "bcsr_fromdense", "bcsr_todense",
            "coo_fromdense", "coo_matmat", "coo_matvec", "coo_spmm", "coo_spmv", "coo_todense", "csr_fromdense", "csr_matmat", "csr_matvec",
            "csr_spmm", "csr_spmv", "csr_todense", "todense",
        ),
    ),
    Family(
        "a shape that is not known when the step is compiled",
        "give every axis a number; what is compiled is compiled once for each shape",
        ("dim_as_value", "dimension_size"),
    ),
    Family(
        "a gradient of windows that neither max nor min chooses from",
        "pool with jax.lax.reduce_window and max, min or add, as flax.linen.max_pool does",
        ("select_and_scatter",),
    ),
    Family(
        "what JAX's transformations make for themselves, and take away again",
        f"find the experimental function of JAX that it comes from, and leave that out; or {ELSEWHERE}",
        (
            "broadcast_to", "call", "call_hi_primitive", "call_hi_primitive_linearized", "create_linear",
            "custom_jvp_call_jaxpr", "eval_jaxpr", "jaxpr_call", "reciprocal", "zeros_like",
        ),
    ),
)  # fmt: skip
_FAMILY_OF = {primitive: family for family in FAMILIES for primitive in family.primitives}


def is_known(primitive: str) -> bool:
    """Whether a primitive of JAX is in one of the families."""
    return primitive in _FAMILY_OF


def advice(primitive: str) -> str:
    """What a primitive without a rule is and what to do instead, in a sentence or two."""
    family = _FAMILY_OF.get(primitive)
    if family is None:
        return f"Write it with other functions of jax.numpy, {ELSEWHERE}, or add a rule to tpuflow/lower/importers/jaxpr/rules/."
    return f"It is {family.what}. Instead, {family.instead}."
