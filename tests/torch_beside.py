"""What tests of PyTorch's door share: a module on the device, and how closely its tensors are held to eager PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from tpuflow.torch import backend

CLOSE = 2e-5
"""Relative to the largest element: fp32 sums in another order, a few layers deep."""


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options=options)


def assert_close(found: Any, expected: Any, name: str = "", close: float = CLOSE) -> None:
    assert (found is None) == (expected is None), name
    if expected is None:
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    if not expected.numel():
        return
    found, expected = found.detach().double(), expected.detach().double()
    off = torch.where(found == expected, 0.0, (found - expected).abs())  # infinities are equal
    off = torch.where(found.isnan() & expected.isnan(), 0.0, off)
    finite = expected[expected.isfinite()].abs()
    assert float(off.max()) <= close * max(1.0, float(finite.max()) if finite.numel() else 1.0), name
