"""One step on five chips: how long it is, and what bounds it."""

import jax
import optax

import tpuflow
from tpuflow.examples.models.lenet import LeNet5

shapes = jax.ShapeDtypeStruct((1024, 32, 32, 1), "float32"), jax.ShapeDtypeStruct((1024,), "int32")
for chip in ("tpu-v3", "tpu-v5e", "tpu-v6e", "ascend910", "bm1690"):
    estimate = tpuflow.estimate_training(LeNet5(), shapes, policy="mixed", optimizer=optax.sgd(0.1), chip=chip)
    memory = estimate.memory.peak_memory_in_bytes / 2**20
    print(f"{chip:10} {1e6 * estimate.step_seconds:8.1f} us a step, {memory:6.1f} MiB")
