"""PyTorch support: modules run on the simulated device by `torch.compile(model, backend="tpuflow")`, whole training steps by
`train_step`."""

from tpuflow.torch.backend import backend
from tpuflow.torch.breaks import Explanation, GraphBreak, GraphBreakWarning, explain
from tpuflow.torch.step import TorchStep, train_step
from tpuflow.torch.table import lowers

__all__ = ["Explanation", "GraphBreak", "GraphBreakWarning", "TorchStep", "backend", "explain", "lowers", "train_step"]
