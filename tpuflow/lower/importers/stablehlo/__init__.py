"""From a StableHLO module to a graph: one rule per operation."""

from tpuflow.lower.importers.stablehlo.importer import HOST_CALL, RULES, Imported, lower_stablehlo

__all__ = ["HOST_CALL", "RULES", "Imported", "lower_stablehlo"]
