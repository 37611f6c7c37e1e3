"""ResNet-50, batch 4 at 224x224: tpuflow's sink beside plain JAX and PyTorch, interleaved in one run."""

from __future__ import annotations

from bench.contest import NARROW_LIMITS, Workload, main
from models.resnet import MINDSPORE, resnet50

WORKLOAD = Workload(
    "resnet50", resnet50,
    lambda twins: twins.ResNet((3, 4, 6, 3), bottleneck=True, classes=10, even=False, epsilon=MINDSPORE.epsilon),
    (224, 224, 3), batch=4, steps=1, rounds=5, lr=0.01, momentum=0.9,
    policies=("fp32", "fp16", "mixed"),
    limits={
        ("tpuflow fp32", "jax_jit fp32"): 1.1,
        **NARROW_LIMITS,
    },
    peer="jax_jit",  # a scan takes it 25 times as long: XLA:CPU's own convolutions are slow inside loops
)  # fmt: skip

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
