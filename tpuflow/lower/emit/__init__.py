"""Emission: from graph nodes to kernels, a template for each kind of kernel."""

from tpuflow.lower.emit.in_place import overwritable
from tpuflow.lower.emit.repeated import Repeated
from tpuflow.lower.emit.templates import emit_copy, emit_node

__all__ = ["Repeated", "emit_copy", "emit_node", "overwritable"]
