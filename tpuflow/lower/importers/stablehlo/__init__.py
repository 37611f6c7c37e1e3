"""From a StableHLO module to a graph: one rule per operation. A jaxpr has no need of it, and of jaxlib's MLIR bindings."""
