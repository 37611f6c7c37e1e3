"""Which memory an array lies in: that of the device, or what the host lends it. A program has one device."""

from __future__ import annotations

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.operations.complex import Number, packed, planes

HOST_KINDS = ("pinned_host", "unpinned_host", "Host")
"""JAX's names of the host's memory: of its kinds, and of the `jax.memory.Space`. All others are the device's."""


def device_put(b: Builder, x: Number, kind: str) -> Number:
    """An array in the memory that has one of JAX's names."""
    space = "host" if kind in HOST_KINDS else "hbm"
    return packed([b.device_put(plane, space) for plane in planes((x,))], (x.type,))[0]
