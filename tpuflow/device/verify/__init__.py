"""What a loaded Program must satisfy before any engine runs it."""

from tpuflow.device.verify.program import verify

__all__ = ["verify"]
