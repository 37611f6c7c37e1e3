"""The window geometry that convolutions and windowed reductions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Sizes = Sequence[int]
Padding = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WindowDimension:
    """One axis of a windowed operation, in the terms of XLA's WindowDimension; `size` is the array's length along it.

    Element i lies at position low + i * base_dilation of the padded axis. Window o covers the positions
    o * stride + k * window_dilation, for k in 0 .. window - 1.
    """

    size: int
    window: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    base_dilation: int = 1
    window_dilation: int = 1

    @property
    def out(self) -> int:
        """How many windows there are."""
        padded = self.low + self.high + ((self.size - 1) * self.base_dilation + 1 if self.size else 0)
        reach = (self.window - 1) * self.window_dilation + 1 if self.window else 0
        return max(0, (padded - reach) // self.stride + 1)


Axis = TypeVar("Axis", bound=WindowDimension)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The windows of an operation: one entry per axis, as in `WindowDimension`. Padding is (low, high); negative amounts crop."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sizes, strides: Sizes, padding: Padding, base_dilation: Sizes = (), window_dilation: Sizes = ()) -> SlidingWindow:
        """From any sequences; dilations are 1 if they are left out."""
        ones = (1,) * len(sizes)
        pads = tuple((int(low), int(high)) for low, high in padding)
        return cls(tuple(sizes), tuple(strides), pads, tuple(base_dilation) or ones, tuple(window_dilation) or ones)

    def axes(self, shape: Sizes, kind: type[Axis]) -> list[Axis]:
        """The axes of an array of this shape."""
        rows = zip(shape, self.sizes, self.strides, self.padding, self.base_dilation, self.window_dilation, strict=True)
        return [kind(n, window, stride, low, high, base, between) for n, window, stride, (low, high), base, between in rows]
