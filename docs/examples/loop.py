"""A training loop of your own, of which the device runs 50 steps a round trip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpuflow

rng = np.random.default_rng(0)
x = rng.standard_normal((3200, 4)).astype(np.float32)
data = x, x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32)
optimizer = optax.adam(1e-2)


def step(state, batch):
    """Least squares."""
    weights, memory = state
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch[0] @ w - batch[1]) ** 2))(weights)
    updates, memory = optimizer.update(gradient, memory)
    return (optax.apply_updates(weights, updates), memory), loss


weights = jnp.zeros(4)
for sunk in tpuflow.sink(step, data, 50, state=(weights, optimizer.init(weights)), batch_size=32, epochs=10):
    print(f"step {sunk.step}: loss {sunk.metrics[-1]:.4f}")
print("weights", np.round(np.asarray(sunk.state[0]), 2))
