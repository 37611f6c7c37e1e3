"""The local rewriting rules of `Simplify`, by family; each returns a replacement with the same bits, or None."""

from tpuflow.lower.passes.rules import choice, combine, contract, control, convert, fold, move, unit
from tpuflow.lower.passes.rules.table import RULES

__all__ = ["RULES", "choice", "combine", "contract", "control", "convert", "fold", "move", "unit"]
