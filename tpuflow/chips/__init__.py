"""Facts about chips."""

from tpuflow.chips.catalog import CHIPS, get_chip
from tpuflow.chips.chip import Chip

__all__ = ["CHIPS", "Chip", "get_chip"]
