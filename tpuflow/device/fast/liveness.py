"""Which buffers a piece of code reads, writes and needs: what an XLA loop has to carry, and what it may forget."""

from __future__ import annotations

from collections.abc import Iterable

from tpuflow.isa.program import Block, Infeed, Kernel, Loop, Outfeed, Switch, While, children


def reads(block: Block) -> frozenset[int]:
    """Buffers that one block reads itself (nested blocks not counted)."""
    match block:
        case Kernel():
            return frozenset(w.buffer for i in block.instructions for role, w in i.windows() if role == "read" or _updates(i))
        case Loop():
            return frozenset((block.trips,))
        case While():
            return frozenset((block.predicate,))
        case Switch():
            return frozenset((block.index,))
        case Outfeed():
            return frozenset((block.buffer,))
    return frozenset()


def _updates(instruction: object) -> bool:
    return hasattr(instruction, "index") and hasattr(instruction, "mode")


def writes(block: Block) -> frozenset[int]:
    """Buffers that one block writes itself."""
    if isinstance(block, Kernel):
        return frozenset(w.buffer for i in block.instructions for role, w in i.windows() if role == "write")
    return frozenset((block.buffer,)) if isinstance(block, Infeed) else frozenset()


def all_writes(blocks: Iterable[Block]) -> frozenset[int]:
    """Buffers written anywhere inside."""
    found: frozenset[int] = frozenset()
    for block in blocks:
        found |= writes(block)
        for _, nested in children(block):
            found |= all_writes(nested)
    return found


def needed_before(blocks: tuple[Block, ...], needed_after: frozenset[int], whole: frozenset[tuple[int, int]]) -> list[frozenset[int]]:
    """Buffers whose content matters before each block, and after the last: one entry more than there are blocks.

    `whole` holds (id of kernel, buffer) where the kernel overwrites the buffer completely, which ends the need for its old content.
    """
    need = needed_after
    result = [need]
    for block in reversed(blocks):
        need = _before(block, need, whole)
        result.append(need)
    return result[::-1]


def _before(block: Block, after: frozenset[int], whole: frozenset[tuple[int, int]]) -> frozenset[int]:
    match block:
        case Kernel():
            return (after - {b for b in writes(block) if (id(block), b) in whole}) | reads(block)
        case Infeed():
            return after - {block.buffer}
        case Outfeed():
            return after | {block.buffer}
        case Loop():
            return loop_need(block.body, after, whole) | reads(block)
        case While():
            return while_need(block, after, whole)
        case Switch():
            branches = [needed_before(b, after, whole)[0] for b in block.branches]
            return frozenset().union(*branches) | reads(block)
    raise AssertionError(block)


def loop_need(body: tuple[Block, ...], after: frozenset[int], whole: frozenset[tuple[int, int]]) -> frozenset[int]:
    """Buffers needed at the head of a loop: by the body, by its next trip, or after the loop."""
    need = after
    while True:
        grown = need | needed_before(body, need, whole)[0]
        if grown == need:
            return need
        need = grown


def while_need(block: While, after: frozenset[int], whole: frozenset[tuple[int, int]]) -> frozenset[int]:
    """Buffers needed before the condition of a while loop is first computed."""
    need = after | {block.predicate}
    while True:
        body = needed_before(block.body, need, whole)[0]
        grown = need | needed_before(block.condition, need | body | {block.predicate}, whole)[0]
        if grown == need:
            return need
        need = grown
