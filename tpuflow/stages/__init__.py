"""`tpuflow.jit` and the stages of a function on its way to the device, in the words of jax.stages."""
