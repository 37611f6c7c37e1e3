"""`tpuflow.train`, `tpuflow.sink`, and what they hand back."""
