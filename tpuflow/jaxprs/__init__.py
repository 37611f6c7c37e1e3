"""Reading jaxprs: the one walk, what is a call, how a primitive is bound again, and all that depends on JAX's version."""
