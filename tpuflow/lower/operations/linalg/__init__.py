"""Factorisations and solvers of matrices as XLA expands them for TPUs: loops of vector instructions in blocks, products between them."""
