"""A compiled step as a file: saved, loaded and run without compiler, Flax or Optax."""

import jax
import jax.numpy as jnp
import numpy as np

import tpuflow


@tpuflow.jit
def step(w, x):
    """One step of gradient descent."""
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


w, x = np.ones((16, 8), np.float32) / 16, np.ones((4, 16), np.float32)
step.lower(w, x).compile().save("step.tpx")
loaded = tpuflow.Executable.load("step.tpx")
found = loaded.run({"w": w, "x": x})  # by the names of the arguments
print("the same bits:", np.array_equal(found["output 0"], step(w, x)))
