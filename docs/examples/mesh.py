"""The same training on one chip and on four: the losses agree, and each chip holds a quarter of the optimizer's state."""

import numpy as np
import optax

import tpuflow
from tpuflow.examples.models.mlp import MLP

rng = np.random.default_rng(0)
data = rng.standard_normal((256, 784)).astype(np.float32), rng.integers(0, 10, 256).astype(np.int32)
setting = {"policy": "fp32", "optimizer": optax.sgd(0.01, momentum=0.9), "batch_size": 64, "epochs": 2, "seed": 0}
one = tpuflow.train(MLP(), data, **setting)
four = tpuflow.train(MLP(), data, mesh={"data": 4}, sharding="zero1", **setting)
furthest = np.abs(np.asarray(one.losses) - np.asarray(four.losses)).max()
print(f"{len(one.losses)} losses within 1e-5 of each other: {furthest < 1e-5}")
