"""What the configurations of diffusers' models have in common, and the names of their tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from .configs import ACTIVATIONS, FileConfig, indivisible

LISTS = ("down_blocks", "up_blocks", "resnets", "attentions", "transformer_blocks", "downsamplers", "upsamplers", "to_out", "net")
"""Lists of modules in the originals: their element i is name.i there and name_i here."""

_ELEMENT = re.compile(rf"({'|'.join(LISTS)})_\d+(_?)")
_NUMBER = re.compile(rf"({'|'.join(LISTS)})_\d+")


@dataclasses.dataclass(frozen=True)
class DiffusersConfig(FileConfig):
    """The fields that AutoencoderKL and UNet2DConditionModel share, and `gradient_checkpointing`, which is not in the file.

    With that, the inner values of residual blocks and of attention are computed again in the backward pass instead of being kept
    (`jax.checkpoint`).
    """

    KIND: ClassVar[str] = "_class_name"
    ARCHITECTURE: ClassVar[str]
    """diffusers' class that computes the same."""
    BLOCKS: ClassVar[Mapping[str, Collection[str]]]
    """Field that lists kinds of blocks -> those that there are."""
    OURS: ClassVar[tuple[str, ...]] = ("gradient_checkpointing",)

    down_block_types: tuple[str, ...] = ()
    up_block_types: tuple[str, ...] = ()
    block_out_channels: tuple[int, ...] = ()
    layers_per_block: int = 1
    act_fn: str = "silu"
    norm_num_groups: int = 32
    gradient_checkpointing: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def kind(cls) -> str:
        """As `FileConfig.kind`."""
        return cls.ARCHITECTURE

    @classmethod
    def choices(cls) -> Mapping[str, Collection[str]]:
        """As `FileConfig.choices`."""
        return {"act_fn": ACTIVATIONS}

    def conflicts(self) -> list[str]:
        """Each kind of block is one that there is; there are as many as widths, which are multiples of the groups."""
        found: list[str] = []
        for width in self.block_out_channels:
            found += indivisible("a width in block_out_channels", width, "norm_num_groups", self.norm_num_groups)
        for name, known in self.BLOCKS.items():
            kinds = getattr(self, name)
            found += [f"{name} has {kind!r}, expected {' or '.join(known)}" for kind in kinds if kind not in known]
            if len(kinds) != len(self.block_out_channels) or not kinds:
                found.append(
                    f"{name} has {len(kinds)} blocks and block_out_channels {len(self.block_out_channels)} widths, expected as many"
                )
        return found


def torch_layers(variables: Mapping[str, Any]) -> dict[str, str]:
    """Names of modules in diffusers' state dicts -> places in these Flax variables, as `tpuflow.importers` take them.

    Modules are called as the originals' but for elements of lists, so that the rows follow from the variables, or from their shapes.
    """
    paths = sorted({"/".join(path) for path in _modules(variables.get("params", variables), ())})
    return {_ELEMENT.sub(_starred, path).replace("/", "."): _NUMBER.sub(r"\1_*", path) for path in paths}


def _starred(found: re.Match[str]) -> str:
    return f"{found[1]}.*{'.' if found[2] else ''}"


def _modules(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of modules that have parameters of their own."""
    if any(not isinstance(child, Mapping) for child in tree.values()):
        yield path
    for name, child in tree.items():
        if isinstance(child, Mapping):
            yield from _modules(child, (*path, name))
