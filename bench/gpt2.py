"""GPT-2 with 124 million parameters, batch 4 of 128 tokens, AdamW: tpuflow's sink beside plain JAX, interleaved in one run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.contest import NARROW_LIMITS, Workload, main
from models.gpt2 import GPT2, NO_DROPOUT, SIZES

CONFIG = replace(SIZES["gpt2"], **NO_DROPOUT)


def _model() -> Any:
    return GPT2(CONFIG)


WORKLOAD = Workload(
    "gpt2", _model, None, (128,), batch=4, steps=2, rounds=5, lr=1e-4, momentum=None,
    policies=("fp32", "fp16", "mixed"),
    limits={
        ("tpuflow fp32", "jax_jit fp32"): 1.0,
        **NARROW_LIMITS,
    },
    peer="jax_jit", vocabulary=CONFIG.vocab_size, peak_limit=1.1, cold_limit=1.5,
)  # fmt: skip

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
