"""What a Program is, in a few lines: chip, signature, memory, kernels."""

from __future__ import annotations

from collections import Counter

from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Kernel, Program, walk


def summary(program: Program) -> list[str]:
    """The lines that describe a saved Program: two on its origin and memory, then one for each port and each kernel."""
    kernels = list(program.kernels())
    opcodes = Counter(i.mnemonic for k in kernels for i in k.instructions)
    lines = [
        f"program {program.name or '(no name)'} for chip {program.chip.name}, code {code_hash(program)[:16]}",
        f"HBM: {program.hbm_bytes} bytes in {sum(b.space == 'hbm' for b in program.buffers)} buffers, "
        f"{sum(len(c.data) for c in program.constants)} bytes of constants",
    ]
    if program.resident:
        where, size = program.chip.array_space.upper(), sum(program.buffers[n].bytes for n in program.resident)
        lines.append(f"{where}: {len(program.resident)} arrays that stay there, {size} bytes")
    if at_host := [b for b in program.buffers if b.space == "host"]:
        lines.append(f"host memory: {len(at_host)} arrays that lie there, {program.host_bytes} bytes")
    for what, ports in (("input", program.inputs), ("output", program.outputs), ("infeed", program.infeeds), ("outfeed", program.outfeeds)):
        lines += [f"{what:8} {p.name or '-'}: {p.dtype}{list(p.shape)}{' (donated)' if p.donated else ''}" for p in ports]
    lines.append(f"{len(kernels)} kernels; instructions: {', '.join(f'{n} {c}' for n, c in sorted(opcodes.items()))}")
    lines += [
        f"  {place}: {block.title or 'kernel'} grid {[g.size for g in block.grid]}"
        for place, block in walk(program.code)
        if isinstance(block, Kernel)
    ]
    return lines
