"""A step as our compiler and as XLA:TPU's compile it, side by side: `tpuflow.compare`, `tpuflow compare`."""
