"""From a jaxpr to a graph: one rule per primitive."""

from tpuflow.lower.importers.jaxpr import rules
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr
from tpuflow.lower.importers.jaxpr.registry import RULES

__all__ = ["RULES", "lower_jaxpr", "rules"]
