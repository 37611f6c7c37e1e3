"""LeNet-5, batch 32: tpuflow's sink beside plain JAX and PyTorch, interleaved in one run."""

from __future__ import annotations

from bench.contest import NARROW_LIMITS, Workload, main
from models.lenet import LeNet5

WORKLOAD = Workload(
    "lenet", LeNet5, lambda twins: twins.SmallNet(1, conv_bias=False),
    (32, 32, 1), batch=32, steps=100, rounds=9, lr=0.01, momentum=0.9,
    policies=("fp32", "fp16", "mixed"),
    limits={
        ("tpuflow fp32", "jax_scan fp32"): 0.5,
        ("tpuflow fp32", "torch fp32"): 1.3,
        **NARROW_LIMITS,
    },
)  # fmt: skip

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
