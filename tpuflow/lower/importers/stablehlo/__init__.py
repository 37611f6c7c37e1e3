"""From a StableHLO module to a graph: one rule per operation."""

from tpuflow.lower.importers.stablehlo.importer import RULES, Imported, lower_stablehlo
from tpuflow.lower.importers.stablehlo.parsing import BYTECODE

__all__ = ["BYTECODE", "RULES", "Imported", "lower_stablehlo"]
