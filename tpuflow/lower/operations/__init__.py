"""Builders of nodes for the operations that importers meet: plain data and values in, nodes of the graph out. JAX is not known here."""
