"""Find the layer that overflows in fp16: a network whose middle layer is too loud."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

import tpuflow


class Loud(nn.Module):
    """Two layers, between which numbers grow beyond what fp16 holds."""

    @nn.compact
    def __call__(self, x):
        """[B, 8] -> [B, 3]."""
        hidden = nn.Dense(16, name="quiet")(x)
        hidden = nn.Dense(16, name="loud")(300.0 * hidden) * 300.0
        return nn.Dense(3, name="last")(jnp.tanh(hidden))


rng = np.random.default_rng(0)
batch = rng.standard_normal((32, 8)).astype(np.float32), rng.integers(0, 3, 32).astype(np.int32)
for policy in ("fp16", "bf16"):
    report = tpuflow.check_numerics(Loud(), batch, policy=policy, optimizer=optax.sgd(1e-2))
    print(f"{policy}: first non-finite operation: {report.first_nonfinite}")
