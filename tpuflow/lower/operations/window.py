"""Windows over an array, as convolutions and windowed reductions have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Sizes = Sequence[int]
Padding = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WindowDimension:
    """One axis under a window: element i is at position low + i * spread of the padded axis; window o covers the positions
    o * stride + k * dilation, k below `window`.
    """

    size: int
    window: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    spread: int = 1
    dilation: int = 1

    @property
    def out(self) -> int:
        """How many windows there are."""
        padded = self.low + self.high + ((self.size - 1) * self.spread + 1 if self.size else 0)
        reach = (self.window - 1) * self.dilation + 1 if self.window else 0
        return max(0, (padded - reach) // self.stride + 1)


Axis = TypeVar("Axis", bound=WindowDimension)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """One entry an axis, in the words of `WindowDimension`. Padding is (low, high); negative amounts cut."""

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
        return [kind(n, window, stride, low, high, spread, gap) for n, window, stride, (low, high), spread, gap in rows]
