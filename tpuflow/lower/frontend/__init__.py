"""From a jaxpr to a graph: one rule per primitive."""

from tpuflow.lower.frontend import rules
from tpuflow.lower.frontend.jaxpr import lower_jaxpr
from tpuflow.lower.frontend.registry import RULES

__all__ = ["RULES", "lower_jaxpr", "rules"]
