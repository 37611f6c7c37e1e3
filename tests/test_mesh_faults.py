"""What the verifier and the reference engine say of collectives that are put wrongly into a Program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.program_builder import Builder, KernelBuilder
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.verify import verify
from tpuflow.dtypes import F32, S32
from tpuflow.errors import HazardError, ProgramError
from tpuflow.isa import vector
from tpuflow.isa.collectives import Await, Collective, MeshAxis, Position
from tpuflow.isa.program import Block, Kernel, Loop, Program, Switch

N = 8


class Faulty:
    """A Program on four chips by hand: x is doubled, summed over the chips, and the sum is doubled again."""

    def __init__(self) -> None:
        self.b = Builder()
        self.x, self.y = self.b.input("x", F32, (N,)), self.b.buffer(F32, (N,))
        self.total, self.out = self.b.buffer(F32, (N,)), self.b.buffer(F32, (N,))
        self.start = Collective("all_reduce", "add", (0,), self.y, self.total, 0, where="model.py:7 (f)")
        self.wait = Await(0)

    def double(self, source: int, target: int) -> Kernel:
        """target = source + source."""
        k = KernelBuilder(self.b)
        made = k.tile(F32, (N,))
        read = k.load(k.window(source, k.tile(F32, (N,))))
        k.result(made, vector.Binary("add", made, read, read), window=k.window(target, made))
        k.release()
        return k.kernel()

    def program(self, *code: Block, mesh: tuple[MeshAxis, ...] = (MeshAxis("d", 4),)) -> Program:
        """With these blocks; what is in `out` goes out."""
        if not self.b.outputs:
            self.b.output("out", self.out)
        made = self.b.program(*code)
        inputs = tuple(dataclasses.replace(p, cut=((0,),)) if p.name == "x" else p for p in made.inputs)
        return dataclasses.replace(made, mesh=mesh, inputs=inputs)

    def run(self, program: Program, schedule: str = "late") -> np.ndarray:
        """Without the verifier."""
        x = np.arange(4 * N, dtype=np.float32)
        return ReferenceEngine(program, verify=False, schedule=schedule).launch([x])[0][0]


def test_a_program_by_hand_is_right_and_comes_back_from_its_file_and_its_text() -> None:
    f = Faulty()
    program = f.program(f.double(f.x, f.y), f.start, f.wait, f.double(f.total, f.out))
    verify(program)
    expected = 4 * np.arange(4 * N, dtype=np.float32).reshape(4, N).sum(0)
    for schedule in ("late", "early"):
        np.testing.assert_array_equal(f.run(program, schedule), expected)
    from tpuflow.isa import file
    from tpuflow.isa.assembler import assemble
    from tpuflow.isa.disassembler import disassemble

    assert file.from_bytes(file.to_bytes(program)) == assemble(disassemble(program)) == program
    assert file.from_bytes(file.to_bytes(program)).code[1].where == "model.py:7 (f)"  # type: ignore[union-attr]


FAULTS: dict[str, tuple[Callable[[Faulty], tuple[Block, ...]], str, str]] = {
    "a source that is overwritten while it is sent": (
        lambda f: (f.double(f.x, f.y), f.start, f.double(f.x, f.y), f.wait, f.double(f.total, f.out)),
        r"block 2: overwrites what is being sent by all_reduce 1 .*await of semaphore 0 before it\. \(model\.py:7 \(f\)\)",
        r"kernel 2.*writes buffer 1, which all_reduce 1 is sending \(model\.py:7 \(f\)\).*Source: kernel\.py:9",
    ),
    "a result that is read too early": (
        lambda f: (f.double(f.x, f.y), f.start, f.double(f.total, f.out), f.wait),
        r"block 2: reads what has not arrived yet from all_reduce 1",
        r"kernel 2.*reads what has not arrived yet in buffer 2.*Source: kernel\.py:2",
    ),
    "a target that is written before the sum is in it": (
        lambda f: (f.double(f.x, f.y), f.start, f.double(f.x, f.total), f.wait, f.double(f.total, f.out)),
        r"block 2: writes where something arrives from all_reduce 1",
        r"kernel 2.*writes buffer 2, which all_reduce 1 is still receiving",
    ),
    "a wait for nothing": (
        lambda f: (f.double(f.x, f.y), f.double(f.y, f.out), f.wait),
        r"await 2: nothing is on its way for semaphore 0",
        r"await 2: nothing is on its way for semaphore 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_meets_a_collective_is_refused_and_found_by_the_reference_engine(name: str) -> None:
    blocks, refused, found = FAULTS[name]
    f = Faulty()
    program = f.program(*blocks(f))
    with pytest.raises(ProgramError, match=refused):
        verify(program)
    for schedule in ("late", "early"):
        with pytest.raises(HazardError, match=found):
            f.run(program, schedule)


def test_chips_that_come_to_different_collectives_are_refused_and_named() -> None:
    f = Faulty()
    where, other = f.b.buffer(S32), dataclasses.replace(f.start, reducer="max", where="model.py:9 (f)")
    choice = Switch(where, ((f.start, f.wait), (other, f.wait)))
    program = f.program(f.double(f.x, f.y), Position(0, where), choice, f.double(f.y, f.out))
    with pytest.raises(ProgramError, match=r"collective 2\.branch0\.0: lies in switch 2, which chips may run differently.*model\.py:7"):
        verify(program)
    with pytest.raises(HazardError, match=r"chip 0 comes to all_reduce .* 2\.branch0\.0 \(model\.py:7 \(f\)\), chip 1 to .* 2\.branch1\.0"):
        f.run(program)


def _changed(**changes: Any) -> Callable[[Faulty], tuple[Block, ...]]:
    return lambda f: (f.double(f.x, f.y), dataclasses.replace(f.start, **changes), f.wait, f.double(f.total, f.out))


MISFITS: dict[str, tuple[Callable[[Faulty], tuple[Block, ...]], str]] = {
    "axis": (_changed(axes=(1,)), r"axes \[1\]; expected different ones of the 1 of the mesh"),
    "twice": (_changed(axes=(0, 0)), r"axes \[0, 0\]; expected different ones"),
    "no reducer": (_changed(reducer="none"), "expected one that combines"),
    "reducer": (_changed(kind="permute"), "has reducer 'add'; expected none"),
    "elements": (_changed(kind="reduce_scatter"), r"sends f32\[8\] and receives f32\[8\]; expected f32 of 2 elements"),
    "itself": (_changed(target=1), "share addresses; expected them apart"),
    "pairs": (_changed(kind="permute", reducer="none", pairs=((0, 1), (2, 1))), "a chip receives twice"),
    "strangers": (_changed(kind="permute", reducer="none", pairs=((0, 4),)), "not in the group of 4"),
    "buffer": (_changed(source=99), "buffer 99 does not exist"),
    "never awaited": (lambda f: (f.double(f.x, f.y), f.start, f.double(f.x, f.out)), "nobody waits for semaphore 0 before the end"),
    "semaphore": (
        lambda f: (f.double(f.x, f.y), f.start, dataclasses.replace(f.start, target=f.out), f.wait, f.wait),
        "semaphore 0 is taken by all_reduce 1, which is still on its way",
    ),
    "awaited elsewhere": (
        lambda f: (f.double(f.x, f.y), f.start, Loop(f.b.constant(1, S32), (f.wait,)), f.double(f.total, f.out)),
        r"await 2\.body\.0: nothing is on its way for semaphore 0 in this list",
    ),
    "nothing sent": (lambda f: (f.start, f.wait, f.double(f.total, f.out)), "sends buffer 1, which is not written"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_collective_that_does_not_fit_is_refused(name: str) -> None:
    blocks, refused = MISFITS[name]
    f = Faulty()
    with pytest.raises(ProgramError, match=refused):
        verify(f.program(*blocks(f)))


def test_a_mesh_and_its_cuts_are_checked() -> None:
    f = Faulty()
    code = (f.double(f.x, f.y), f.start, f.wait, f.double(f.total, f.out))
    for mesh, refused in (
        ((MeshAxis("d", 4), MeshAxis("d", 2)), "different names"),
        ((MeshAxis("d", 0),), "sizes of 1 at least"),
        ((MeshAxis("d", 4, joined=True),), "the first axis, 'd', is joined to the one before it; there is none"),
        ((MeshAxis("d", 2**21),), "at most 1048576 in all"),
    ):
        with pytest.raises(ProgramError, match=refused):
            verify(f.program(*code, mesh=mesh))
    program = f.program(*code)
    inputs = tuple(dataclasses.replace(p, cut=((1,),)) for p in program.inputs)
    with pytest.raises(ProgramError, match=r"input 'x' of shape \[8\] is cut \(\(1,\),\); expected .* 1 mesh axes"):
        verify(dataclasses.replace(program, inputs=inputs))
