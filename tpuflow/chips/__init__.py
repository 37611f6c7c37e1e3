"""Facts about chips."""

from tpuflow.chips.catalog import CHIPS
from tpuflow.chips.chip import Chip
from tpuflow.chips.lookup import get_chip

__all__ = ["CHIPS", "Chip", "get_chip"]
