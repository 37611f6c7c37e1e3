"""The example networks, in Flax. They know nothing of tpuflow: plain `jax.jit` of the same module is the truth to compare with."""
