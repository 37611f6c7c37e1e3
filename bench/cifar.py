"""The CIFAR-10 network of PyTorch's tutorial, batch 4: tpuflow's sink beside plain JAX and PyTorch, interleaved in one run."""

from __future__ import annotations

from bench.contest import NARROW_LIMITS, Workload, main
from models.cifar_net import CifarNet

WORKLOAD = Workload(
    "cifar", CifarNet, lambda twins: twins.SmallNet(3, conv_bias=True),
    (32, 32, 3), batch=4, steps=500, rounds=9, lr=0.001, momentum=0.9,
    policies=("fp32", "fp16", "mixed"),
    limits={
        ("tpuflow fp32", "torch fp32"): 1.0,
        ("tpuflow fp32", "jax_scan fp32"): 1.0,
        **NARROW_LIMITS,
    },
)  # fmt: skip

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
