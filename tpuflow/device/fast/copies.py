"""Copies to the chip as if there were none: kernels read what was copied where it was copied from.

An array under two numbers would be two arrays to whatever looks for updates in place, and to executables that hand them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.device.fast.liveness import reads, writes
from tpuflow.isa.kernel_forms import KernelForm
from tpuflow.isa.program import Block, Copy, Kernel, Loop, Program, Switch, While, children, walk


def read_at_home(program: Program) -> Program:
    """The same Program whose kernels read the sources of copies in place of their targets, as long as both hold the same and in the list of
    blocks that has the copy. The copies stay."""
    if not any(isinstance(block, Copy) for _, block in walk(program.code)):
        return program
    homes = _Homes(program, dict(program.forms_by_id()))
    return program.with_code(homes.blocks(program.code), homes.forms)


@dataclass(slots=True)
class _Homes:
    """Goes over lists of blocks. `forms`: of the kernels so far, by their `id`; `accessed`: by the numbers of forms, which of their buffers
    kernels read, and which they write."""

    program: Program
    forms: dict[int, KernelForm]
    accessed: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)

    def blocks(self, code: Sequence[Block]) -> tuple[Block, ...]:
        """A list."""
        home: dict[int, int] = {}
        made: list[Block] = []
        for block in code:
            made.append(self._block(block, home))
            if home:
                changed = self._written(block)
                home = {target: source for target, source in home.items() if target not in changed and source not in changed}
            if isinstance(block, Copy) and self._is_same(block):
                home[block.target] = home.get(block.source, block.source)
        return tuple(made)

    def _block(self, block: Block, home: Mapping[int, int]) -> Block:
        match block:
            case Kernel():
                here = {b: home[b] for b in self._accesses(block)[0] if b in home} if home else {}
                return self._elsewhere(block, here) if here else block
            case Loop():
                return replace(block, body=self.blocks(block.body))
            case While():
                return replace(block, condition=self.blocks(block.condition), body=self.blocks(block.body))
            case Switch():
                return replace(block, branches=tuple(map(self.blocks, block.branches)))
        return block

    def _elsewhere(self, kernel: Kernel, here: Mapping[int, int]) -> Kernel:
        """A kernel that reads other buffers. Its form is the same unless a buffer that it uses anyway is among these."""
        made, form = kernel.on(here, "read"), self.forms[id(kernel)]
        buffers = tuple([here.get(b, b) for b in form.buffers])
        if len(set(buffers)) == len(buffers) and here.keys().isdisjoint(self._accesses(kernel)[1]):
            self.forms[id(made)] = KernelForm(form.number, buffers)
        return made

    def _accesses(self, kernel: Kernel) -> tuple[Sequence[int], Sequence[int]]:
        """The buffers that a kernel reads, and those that it writes."""
        form = self.forms[id(kernel)]
        if form.number not in self.accessed:
            found = (reads(kernel), writes(kernel))
            read, written = ([i for i, b in enumerate(form.buffers) if b in some] for some in found)
            self.accessed[form.number] = read, written
        read, written = self.accessed[form.number]
        return [form.buffers[i] for i in read], [form.buffers[i] for i in written]

    def _written(self, block: Block) -> frozenset[int]:
        if isinstance(block, Kernel):
            return frozenset(self._accesses(block)[1])
        return writes(block).union(*(self._written(b) for _, code in children(block) for b in code))

    def _is_same(self, copy: Copy) -> bool:
        """Whether a copy moves a whole array from HBM to the chip."""
        source, target = (self.program.buffers[n] for n in (copy.source, copy.target))
        return copy.index < 0 and source.space == "hbm" != target.space and (source.shape, source.dtype) == (target.shape, target.dtype)
