"""The mapping between PyTorch's tensors and Flax's leaves: names, patterns of names, and the order of axes.

How a PyTorch tensor becomes a Flax leaf:

| PyTorch module       | tensor         | Flax leaf   | axes                                                  |
|----------------------|----------------|-------------|-------------------------------------------------------|
| Linear               | weight         | `kernel`    | [out, in] -> [in, out]                                |
| Conv1d, 2d, 3d       | weight         | `kernel`    | [out, in/groups, *window] -> [*window, in/groups, out] |
| Embedding            | weight         | `embedding` | as they are                                           |
| any norm             | weight         | `scale`     | as they are                                           |
| BatchNorm            | running_mean   | `mean`      | as they are                                           |
| BatchNorm            | running_var    | `var`       | as they are                                           |
| any                  | bias           | `bias`      | as they are                                           |

A mapping has a row for each PyTorch module, in its simplest form `{"features.0": "Conv_0", "fc": "head/Dense_0"}`. Beyond that:

- `"h.*.ln": "h_*/ln"`: a star stands for a number; stars are taken in order.
- `"h.*.ln": "h/ln"`: a star that the Flax side lacks is a leading axis there, over which tensors are stacked: layers in a scan, experts.
- `"h.*.c_attn.weight": "h_*/c_attn/kernel"`: a row that names one tensor and one leaf keeps the axes as they are.
- `"[transformer.]wte": "wte"`: what is in brackets may be missing from the names that are read; it is written.
- `"attn.{to_q|query}": "attn/to_q"`: either name is read, all over the row the first or all over the last; the first is written.
- `"lm_head.weight": "wte/embedding"` after another row with that place: a second name of a tensor, tied to it. It may be missing, must be
  equal, and is not written.
- `"h.*.attn.mask": None`: a tensor without a counterpart; it may be there or not. So is every `num_batches_tracked`.
- `"fc": Flattened("fc", channels, height, width)`: a Linear that follows a flattened image reads its inputs in the order C, H, W in PyTorch
  and H, W, C in Flax.

ConvTranspose is not converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

COUNTERPARTS: Mapping[str, str] = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
"""Flax leaf name -> PyTorch tensor name."""

SPELLINGS: Mapping[str, str] = {"weight": "gamma", "bias": "beta"}
"""PyTorch tensor name -> what it is called in files that were converted from TensorFlow's, BERT's own among them."""

WITHOUT_COUNTERPART = frozenset({"num_batches_tracked"})
COLLECTIONS = frozenset({"params", "batch_stats"})

_OPTIONAL = re.compile(r"\[(.*?)\]")
_EITHER = re.compile(r"\{(.*?)\|(.*?)\}")


@dataclass(frozen=True, slots=True)
class Flattened:
    """The Flax place of a Linear whose inputs are a flattened image of this size: its kernel's rows go from C, H, W to H, W, C order."""

    path: str
    channels: int
    height: int
    width: int


Place = str | Flattened | None
"""Where a PyTorch module is in Flax, see above."""


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors that a leaf is made of: `name` has a star for each leading axis over which they are stacked.

    turned: whether the axes of each change, as the table above says. row: the row of the mapping, None if there is none.
    """

    name: str
    turned: bool
    place: Place
    row: str | None = None

    @property
    def stacked(self) -> int:
        """The number of leading axes that are stacked."""
        return self.name.count("*")

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """The names of the tensors of a leaf of this shape, in the order of its leading axes; optional parts in brackets."""
        return [_filled(self.name, index) for index in np.ndindex(*shape[: self.stacked])]

    def to_flax(self, tensor: np.ndarray) -> np.ndarray:
        """One tensor with Flax's axes: [out, in] -> [in, out]; [out, in, *window] -> [*window, in, out]."""
        if not self.turned:
            return tensor
        if tensor.ndim < 2:
            raise ValueError("a kernel needs at least two axes")
        if isinstance(self.place, Flattened):
            c, h, w = self.place.channels, self.place.height, self.place.width
            tensor = tensor.reshape(-1, c, h, w).transpose(0, 2, 3, 1).reshape(tensor.shape)  # [out, C*H*W] -> [out, H*W*C]
        return tensor.transpose(*range(2, tensor.ndim), 1, 0)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `to_flax`."""
        if not self.turned:
            return array
        tensor = array.transpose(array.ndim - 1, array.ndim - 2, *range(array.ndim - 2))
        if isinstance(self.place, Flattened):
            c, h, w = self.place.channels, self.place.height, self.place.width
            return tensor.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(tensor.shape)  # [out, H*W*C] -> [out, C*H*W]
        return tensor


@dataclass(frozen=True)
class Row:
    """One row of a mapping."""

    name: str
    place: Place

    def source(self, path: tuple[str, ...]) -> Source | None:
        """What a leaf is made of if this row is about it or about its module."""
        if self._place is None:
            return None
        leaf = self._place.fullmatch("/".join(path))
        module = self._place.fullmatch("/".join(path[:-1]))
        found = leaf or module
        if found is None:
            return None
        name = self.name if leaf else f"{self.name}.{COUNTERPARTS.get(path[-1], path[-1])}"
        return Source(_filled(name, found.groups()), module is not None and path[-1] == "kernel", self.place, self.name)

    def names(self, tensor: str) -> bool:
        """Whether a tensor is the one, or of the module, that this row is about."""
        return self._tensor.fullmatch(tensor) is not None

    @cached_property
    def _place(self) -> re.Pattern[str] | None:
        path = self.place.path if isinstance(self.place, Flattened) else self.place
        return None if path is None else re.compile(re.escape(path).replace(r"\*", r"(\d+)"))

    @cached_property
    def _tensor(self) -> re.Pattern[str]:
        name = re.escape(self.name).replace(r"\*", r"\d+")
        for written, meant in {r"\[": "(?:", r"\]": ")?", r"\{": "(?:", r"\|": "|", r"\}": ")"}.items():
            name = name.replace(written, meant)
        return re.compile(name + r"(\.[^.]+)?")


def rows(mapping: Mapping[str, Place] | None) -> tuple[Row, ...]:
    """The rows of a mapping."""
    return tuple(Row(name, place) for name, place in (mapping or {}).items())


def sources(path: tuple[str, ...], table: tuple[Row, ...]) -> list[Source]:
    """What a leaf is made of, by its path, and then its tensors' other names; without a row it has the same name but for "/"."""
    path = path[1:] if path[0] in COLLECTIONS else path
    found = [source for row in table if (source := row.source(path))]
    name = ".".join((*path[:-1], COUNTERPARTS.get(path[-1], path[-1])))
    return found or [Source(name, path[-1] == "kernel", None)]


def spellings(name: str) -> Iterator[str]:
    """The names that a tensor may be read under: with the optional part first, and of two names the first one first."""
    for one in dict.fromkeys((_EITHER.sub(r"\1", name), _EITHER.sub(r"\2", name))):
        for full in (_OPTIONAL.sub(r"\1", one), _OPTIONAL.sub("", one)):
            yield full
            module, _, tensor = full.rpartition(".")
            if tensor in SPELLINGS:
                yield f"{module}.{SPELLINGS[tensor]}"


def _filled(name: str, numbers: tuple[object, ...]) -> str:
    """A name with its first stars replaced by numbers."""
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name
