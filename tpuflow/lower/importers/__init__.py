"""From what users bring to the graph: parameters of their operations become calls of `tpuflow.lower.operations`, and nothing else."""
