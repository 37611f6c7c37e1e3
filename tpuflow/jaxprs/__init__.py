"""What everyone who reads jaxprs shares: interpreting them, calls, binding primitives, shardings, and all that depends on JAX's version."""
