"""Tensors of PyTorch as arrays of the device and back, without copies where memory can be shared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpuflow.errors import DataError, UnsupportedDtypeError

NARROW: dict[torch.dtype, Any] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
}
"""The device's element type for each of PyTorch's that it can hold; 64-bit integers are 32-bit ones there."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def to_device(tensor: torch.Tensor, name: str) -> Any:
    """A tensor as an array of the device: the same memory where its order and alignment allow.

    Raises:
      UnsupportedDtypeError: the device has no such element type, or the tensor is not on the CPU.
      DataError: a 64-bit integer does not fit in 32 bits.
    """
    check_type(tensor, name)
    tensor = tensor.detach()
    if tensor.dtype == torch.int64:
        tensor = _narrowed(tensor, name)
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return jnp.zeros(tuple(tensor.shape), NARROW[tensor.dtype])
    return jax.dlpack.from_dlpack(tensor.contiguous())


def constant(tensor: torch.Tensor, name: str) -> Any:
    """A tensor that a graph holds, as a constant of the Program: a copy."""
    with _disable_current_modes():
        return jnp.array(to_device(tensor, name), copy=True)


def check_type(tensor: torch.Tensor, name: str) -> None:
    """Raises UnsupportedDtypeError for what the device cannot take."""
    if tensor.dtype not in NARROW:
        raise UnsupportedDtypeError(
            f"{name}: {tensor.dtype} is no type of the device, which has {', '.join(str(t).removeprefix('torch.') for t in NARROW)}; "
            "convert it: x.float()."
        )
    if tensor.device.type not in ("cpu", "meta") or tensor.layout != torch.strided:
        raise UnsupportedDtypeError(
            f"{name}: expected a dense tensor on the CPU, got {tensor.layout} on {tensor.device}; move it: x.cpu()."
        )


def _narrowed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.numel() and (int(tensor.min()) < INT32_MIN or int(tensor.max()) > INT32_MAX):
        raise DataError(f"{name}: holds {int(tensor.abs().max())}, but the device's integers have 32 bits; keep values below 2^31.")
    return tensor.to(torch.int32)


def from_device(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """An array of the device as a tensor of this element type: the same memory unless the type differs."""
    tensor = torch.from_dlpack(array) if array.size else torch.empty(tuple(array.shape), dtype=dtype)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
