"""What a compile says when a program does not fit into HBM: how much is missing, what takes most, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import TensorType

SHOWN = 5
LARGE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer that is live at the peak: what it is called, who makes it (a user's line; none for arguments), what for; of an
    argument, on how many chips of a mesh it is the same."""

    name: str
    source: str
    type: TensorType
    purpose: str  # "input", "donated", "output", "constant" or "" for a temporary
    copies: int = 1

    @property
    def bytes(self) -> int:
        """Size."""
        return self.type.elems * self.type.dtype.bytes


def out_of_memory_text(name: str, use: object, peak_bytes: int, chip: Chip, held: Sequence[Held]) -> str:
    """The whole message; `held` are the buffers live at the peak, largest first, `use` the bytes by purpose in words."""
    missing = peak_bytes - chip.available_hbm_bytes
    lines = [
        f"{name!r} needs {use}: {size_text(missing)} ({missing:,} bytes) more than the {chip.available_hbm_bytes:,} of chip {chip.name!r}.",
        f"The largest of {len(held)} buffers live at the peak:",
        *(f"  {_held_text(h)}" for h in held[:SHOWN]),
        "What would help:",
        *(f"  {text}" for text in advice(held)),
    ]
    return "\n".join(lines)


def advice(held: Sequence[Held]) -> Iterator[str]:
    """What would help, by what takes most."""
    whole = sum(h.bytes for h in held) or 1
    temporary = [h for h in held if not h.purpose]
    forward = sum(h.bytes for h in temporary if "jvp" in h.name and "transpose" not in h.name) / whole
    arguments = sum(h.bytes for h in held if h.purpose in ("input", "donated")) / whole
    copied = sum(h.bytes for h in held if h.copies > 1) / whole
    kept = sum(h.bytes for h in held if h.purpose == "input") / whole
    if forward > LARGE_SHARE:
        yield f"jax.checkpoint (nn.remat) on the layers above: {forward:.0%} are activations kept for the backward pass"
    if sum(h.bytes for h in temporary) / whole > LARGE_SHARE:
        yield "a smaller batch (gradient accumulation keeps its effect), or a 16-bit policy: temporaries shrink with both"
    if kept > LARGE_SHARE:
        yield f"donate_argnums for arguments that results replace: {kept:.0%} are arguments that must be kept"
    if copied > LARGE_SHARE:
        yield (
            "cutting over the mesh what every chip has (sharding='zero1', 'zero2' or 'zero3' in tpuflow.train, in_shardings elsewhere): "
            f"{copied:.0%} are arguments that several chips have alike"
        )
    elif arguments > LARGE_SHARE:
        yield f"sharding over several chips, or an optimizer with less state: {arguments:.0%} are arguments (parameters, optimizer state)"
    yield "a chip with more memory"


def size_text(count_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count_bytes >= size:
            return f"{count_bytes / size:.2f} {unit}"
    return f"{count_bytes} B"


def _held_text(h: Held) -> str:
    return f"{size_text(h.bytes):>11}  {h.type}  {h.name or 'unnamed'}{f' at {h.source}' if h.source else ''}"
