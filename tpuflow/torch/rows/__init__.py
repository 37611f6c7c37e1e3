"""The rows of the table of ATen operations, by family; importing this enters them all."""

from tpuflow.torch.rows import creation, elementwise, indexing, joint, pooling, products, randomness, reductions, shapes

__all__ = ["creation", "elementwise", "indexing", "joint", "pooling", "products", "randomness", "reductions", "shapes"]
