"""Emission: from graph nodes to kernels, a template for each kind of kernel."""

from tpuflow.lower.emit.in_place import may_update_in_place
from tpuflow.lower.emit.templates import emit_copy, emit_node

__all__ = ["emit_copy", "emit_node", "may_update_in_place"]
