"""The reference engine: NumPy, tile by tile, hostile."""

from tpuflow.device.reference.interpreter import ReferenceEngine

__all__ = ["ReferenceEngine"]
