"""The .tpx file: what is written comes back, and what was not written by us is refused."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import programs as hand
from tests import strategies
from tests.mutating import forge, split
from tpuflow.chips import get_chip
from tpuflow.dtypes import F32
from tpuflow.errors import ProgramFileError
from tpuflow.isa import codec, file
from tpuflow.isa.codec import DECLARED, MAX_DEPTH
from tpuflow.isa.dma import Load, Store
from tpuflow.isa.instruction import INSTRUCTIONS, Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Block, Buffer, Constant, Kernel, Loop, Program
from tpuflow.isa.vector import Constant as Splat

REPOSITORY = Path(__file__).parents[1]
HAND = hand.all_programs()
REALISTIC = file.to_bytes(HAND["two_layer"])
TILE = Tile("vmem", 0, F32, (TileAxis(8),))


def program_of(*instructions: Instruction, blocks: tuple[Block, ...] = ()) -> Program:
    kernel = (Kernel((), (), (), instructions, ()),) if instructions else ()
    return Program(get_chip("generic"), (Buffer(F32, (8,), 0),), (), (), (), (), (), kernel + blocks)


def reread(program: Program) -> Program:
    return file.from_bytes(file.to_bytes(program))


def accepted(data: bytes) -> bool:
    """Whether the bytes are a program; any exception but ProgramFileError passes through and fails the test."""
    try:
        file.from_bytes(data)
    except ProgramFileError as error:
        assert str(error)
        return False
    return True


# ---- round trips


@settings(max_examples=60)
@given(strategies.programs())
def test_every_program_survives_a_round_trip(program: Program) -> None:
    again = reread(program)
    assert repr(again) == repr(program)  # repr tells 0, 0.0, -0.0 and False apart, takes NaN for NaN, and shows names
    assert file.to_bytes(again) == file.to_bytes(program)


@pytest.mark.parametrize("cls", DECLARED, ids=lambda cls: cls.mnemonic)
def test_every_instruction_survives_a_round_trip(cls: type[Instruction]) -> None:
    @settings(max_examples=10)
    @given(strategies.instructions_of(cls))
    def check(instruction: Instruction) -> None:
        program = program_of(instruction)
        assert repr(reread(program)) == repr(program)

    check()


@pytest.mark.parametrize("name", HAND)
def test_hand_built_programs_survive_equal_and_with_their_names(name: str) -> None:
    again = reread(HAND[name])
    assert again == HAND[name] and repr(again) == repr(HAND[name])
    assert any(kernel.sources for kernel in again.kernels()) and again.name


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.0, False, True, 1, -1, 0.1, 5e-324, math.inf, -math.inf, 2**63 - 1, -(2**63)], ids=repr
)  # fmt: skip
def test_immediates_and_fills_keep_value_and_type(value: int | float | bool) -> None:
    (kernel,) = reread(program_of(Splat(TILE, value), *_load(value))).kernels()
    splat, load = kernel.body
    for found in (splat.value, load.window.fill):
        assert type(found) is type(value) and repr(found) == repr(value)


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000001234, 0x7FFFFFFFFFFFFFFF])
def test_a_nan_keeps_its_bits(bits: int) -> None:
    nan = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    (kernel,) = reread(program_of(Splat(TILE, nan))).kernels()
    assert struct.pack("<d", kernel.body[0].value) == bits.to_bytes(8, "little")


def test_windows_that_differ_only_in_the_type_of_the_fill_stay_apart() -> None:
    fills = (0, 0.0, -0.0, False)
    (kernel,) = reread(program_of(*(i for fill in fills for i in _load(fill)))).kernels()
    assert [repr(load.window.fill) for load in kernel.body] == [repr(fill) for fill in fills]


def _load(fill: int | float | bool) -> tuple[Instruction, ...]:
    return (INSTRUCTIONS[0x40](Window(0, TILE, (WindowAxis(8, 1),), fill)),)  # type: ignore[call-arg]


def test_numpy_integers_in_shapes_become_plain_ones() -> None:
    program = dataclasses.replace(program_of(), buffers=(Buffer(F32, (np.int64(3), np.int32(4)), np.int64(64)),))  # type: ignore[arg-type]
    assert repr(reread(program).buffers) == repr((Buffer(F32, (3, 4), 64),))


def test_equal_tiles_and_windows_are_written_once() -> None:
    def copies(count: int) -> int:
        fresh = (Splat(dataclasses.replace(TILE), 1) for _ in range(count))
        return len(file.to_bytes(program_of(*fresh)))

    assert copies(100) - copies(99) == 4  # opcode, tile number, type and value


def test_the_bytes_do_not_depend_on_the_hash_seed() -> None:
    script = (
        "from tests.programs import all_programs; from tpuflow.isa.file import to_bytes; from hashlib import sha256;"
        "print([sha256(to_bytes(p)).hexdigest() for p in all_programs().values()])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_reading_and_writing_programs_needs_no_jax() -> None:
    script = (
        "import sys, tpuflow.isa.file, tpuflow.isa.assembler, tpuflow.isa.document;"
        "assert not {'jax', 'flax', 'optax'} & set(sys.modules), 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)


# ---- debug information and the hash


@pytest.mark.parametrize("name", HAND)
def test_stripping_names_and_source_lines_leaves_the_hash_unchanged(name: str) -> None:
    program = HAND[name]
    stripped = program.strip()
    assert file.code_hash(stripped) == file.code_hash(program) == file.code_hash(reread(program))
    assert set(split(file.to_bytes(program))) - set(split(file.to_bytes(stripped))) == {b"DBUG"}
    assert repr(reread(stripped)) == repr(stripped)


def test_names_and_source_lines_are_only_in_the_debug_section() -> None:
    program = dataclasses.replace(
        program_of(blocks=(Kernel((), (), (), (Splat(TILE, 1),), (), name="kernel-name", scope="kernel-scope", sources=("source-line",)),)),
        chip=dataclasses.replace(get_chip("generic"), source="chip-source"), name="program-name", buffer_names=("buffer-name",),
    )  # fmt: skip
    assert reread(program).chip.source == "chip-source"
    for name, content in split(file.to_bytes(program)).items():
        for word in (b"chip-source", b"kernel-name", b"kernel-scope", b"source-line", b"program-name", b"buffer-name"):
            assert (word in content) == (name == b"DBUG")


def test_any_other_change_changes_the_hash() -> None:
    base = program_of(Splat(TILE, 1))
    changed = (
        program_of(Splat(TILE, True)),
        program_of(Splat(dataclasses.replace(TILE, address=64), 1)),
        dataclasses.replace(base, chip=dataclasses.replace(base.chip, cores=2)),
        dataclasses.replace(base, constants=(Constant(0, bytes(32)),)),
        dataclasses.replace(base, buffers=()),
        dataclasses.replace(base, inputs=HAND["map"].inputs),
        dataclasses.replace(base, outputs=HAND["map"].inputs),
    )
    assert len({file.code_hash(p) for p in (base, *changed)}) == len(changed) + 1


def test_every_part_of_a_program_has_its_section() -> None:
    held = [name for names in file.SECTIONS.values() for name in names]
    assert held == [f.name for f in dataclasses.fields(Program) if f.compare]


# ---- damage


def test_two_hundred_flipped_bits_are_all_noticed() -> None:
    rng = np.random.default_rng(0)
    for at in rng.choice(len(REALISTIC) * 8, 200, replace=False):
        damaged = bytearray(REALISTIC)
        damaged[at // 8] ^= 1 << (at % 8)
        assert not accepted(bytes(damaged)), f"bit {at}"


def test_a_flip_in_every_byte_is_noticed() -> None:
    data = file.to_bytes(HAND["transpose"])
    for at in range(len(data)):
        assert not accepted(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]), f"byte {at}"


def test_a_file_cut_anywhere_is_noticed() -> None:
    data = file.to_bytes(HAND["transpose"])
    for length in range(len(data)):
        with pytest.raises(ProgramFileError, match="cut short|empty"):
            file.from_bytes(data[:length])


@pytest.mark.parametrize("more", [b"\0", b"more", REALISTIC], ids=len)
def test_bytes_after_the_end_are_noticed(more: bytes) -> None:
    with pytest.raises(ProgramFileError, match=f"{len(more)} bytes after the end"):
        file.from_bytes(REALISTIC + more)


def test_damage_is_named_by_its_section() -> None:
    sections = split(REALISTIC)
    at = len(REALISTIC) - len(sections[b"DBUG"]) - len(sections[b"MESH"]) - 1
    with pytest.raises(ProgramFileError, match="step.tpx: section CODE .* is damaged"):
        file.from_bytes(REALISTIC[:at] + bytes([REALISTIC[at] ^ 1]) + REALISTIC[at + 1 :], name="step.tpx")


@pytest.mark.parametrize(("major", "minor"), [(file.MAJOR + 1, 0), (0, 9), (file.MAJOR, file.MINOR + 1), (0xFFFF, 0xFFFF)])
def test_another_version_is_refused_by_name(major: int, minor: int) -> None:
    data = bytearray(REALISTIC)
    struct.pack_into("<HH", data, 8, major, minor)
    with pytest.raises(ProgramFileError, match=rf"format {major}\.{minor}; this tpuflow reads"):
        file.from_bytes(bytes(data))


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os._exit, (1,))


FOREIGN = {
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(100),
    "text": b"tpx 11.0\nchip\n",
    "zip": b"PK\x03\x04" + bytes(100),
    "elf": b"\x7fELF" + bytes(100),
    "zeros": bytes(1000),
    "pickle": pickle.dumps(Bomb()),
    "text_transfer": REALISTIC.replace(b"\r\n", b"\n", 1),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused(kind: str) -> None:
    with pytest.raises(ProgramFileError, match="x.bin: not a tpuflow program: it starts with"):
        file.from_bytes(FOREIGN[kind], name="x.bin")


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(ProgramFileError, match="is empty"):
        file.from_bytes(b"")


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused(data: bytes, magic: bool) -> None:
    assert not accepted(file.MAGIC + data if magic else data)


# ---- forged content: every checksum right, the content not


@settings(max_examples=300)
@given(st.sampled_from([*HAND]), st.sampled_from([*file.SECTIONS, file.DEBUG]), st.data())
def test_forged_content_is_a_program_or_a_clear_error(name: str, section: str, data: st.DataObject) -> None:
    sections = split(file.to_bytes(HAND[name]))
    content = bytearray(sections[section.encode()])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    accepted(forge(sections | {section.encode(): bytes(content)}))


@given(st.sampled_from([*file.SECTIONS, file.DEBUG]), st.binary(max_size=60))
def test_random_content_is_a_program_or_a_clear_error(section: str, content: bytes) -> None:
    accepted(forge(split(REALISTIC) | {section.encode(): content}))


@pytest.mark.parametrize("section", [*file.SECTIONS, file.DEBUG])
@pytest.mark.parametrize("length", [b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x04"], ids=["2^64", "2^32", "2^16"])
def test_absurd_lengths_are_refused_before_anything_is_allocated(section: str, length: bytes) -> None:
    data = forge(split(REALISTIC) | {section.encode(): length + b"\1\1\1"})
    tracemalloc.start()
    assert not accepted(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_an_absurd_section_length_is_refused() -> None:
    assert not accepted(forge(split(REALISTIC), {b"CODE": 2**64 - 1}))


def test_missing_unknown_and_disordered_sections_are_refused() -> None:
    sections = split(REALISTIC)
    assert accepted(forge(sections))
    assert accepted(forge({n: c for n, c in sections.items() if n != b"DBUG"}))
    for left_out in file.SECTIONS:
        assert not accepted(forge({n: c for n, c in sections.items() if n != left_out.encode()}))
    assert not accepted(forge(sections | {b"MORE": b""}))
    assert not accepted(forge(dict(reversed(sections.items()))))


def test_a_number_has_one_form_only() -> None:
    sections = split(file.to_bytes(program_of()))
    with pytest.raises(ProgramFileError, match="shortest form"):
        file.from_bytes(forge(sections | {b"CNST": b"\x80\x00"}))
    with pytest.raises(ProgramFileError, match="64 bits"):
        file.from_bytes(forge(sections | {b"CNST": b"\xff" * 9 + b"\x7f"}))


# ---- kernels of one form


def _copying(*pairs: tuple[int, int]) -> Program:
    """A kernel for each pair of buffers, from the first to the second."""

    def window(buffer: int) -> Window:
        return Window(buffer, TILE, (WindowAxis(0, 1, 8),))

    kernels = tuple(Kernel((), (), (Load(window(a)),), (Splat(TILE, 1),), (Store(window(b)),), name=f"{a} to {b}") for a, b in pairs)
    return Program(get_chip("generic"), tuple(Buffer(F32, (8,), 64 * n) for n in range(8)), (), (), (), (), (), kernels)


def _code(*pairs: tuple[int, int]) -> bytes:
    return split(file.to_bytes(_copying(*pairs)))[b"CODE"]


def test_a_kernel_that_comes_again_on_other_buffers_is_written_once() -> None:
    alone, *more = (len(_code(*[(0, 1), (2, 3), (5, 4), (0, 0), (7, 7)][:n])) for n in range(1, 6))
    assert [size - alone for size in more[:2]] == [5, 10]  # a kernel, its form, how many buffers, and these
    assert more[2] - more[1] > 30 and more[3] - more[2] == 4  # in place is another form
    program = _copying((0, 1), (2, 3), (0, 0))
    again = reread(program)
    assert repr(again) == repr(program)
    first, second, _ = again.kernels()
    assert first.body[0] is second.body[0]


def test_a_kernel_of_no_form_or_on_too_few_buffers_is_refused() -> None:
    sections, code = split(file.to_bytes(_copying((0, 1), (2, 3)))), _code((0, 1), (2, 3))
    assert code[-5:] == bytes((0, 0, 2, 4, 6))  # a kernel, its form, how many buffers, and these, zigzagged
    for wrong, message in (
        ((0, 2, 2, 4, 6), "of form 2, expected at most 1"),
        ((0, 0, 1, 4), "has 1 buffers, its form uses numbers .0, 1."),
        ((0, 0, 3, 4, 6, 8), "has 3 buffers, its form uses numbers .0, 1."),
    ):
        with pytest.raises(ProgramFileError, match=message):
            file.from_bytes(forge(sections | {b"CODE": code[:-5] + bytes(wrong)}))


def test_a_few_bytes_cannot_ask_for_any_number_of_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file.to_bytes(_copying((0, 1), (2, 3)))
    monkeypatch.setattr(codec, "MAX_INSTRUCTIONS", 5)
    with pytest.raises(ProgramFileError, match="the kernels have more than 5 instructions"):
        file.from_bytes(data)
    monkeypatch.setattr(file, "MAX_INSTRUCTIONS", 5)
    with pytest.raises(ProgramFileError, match="cannot write the program: its kernels have 6 instructions, expected at most 5"):
        file.to_bytes(_copying((0, 1), (2, 3)))


def _loops(depth: int) -> Program:
    block: Block = Loop(0, ())
    for _ in range(depth - 1):
        block = Loop(0, (block,))
    return program_of(blocks=(block,))


def test_blocks_nest_to_the_limit_and_no_further() -> None:
    assert reread(_loops(MAX_DEPTH)) == _loops(MAX_DEPTH)
    with pytest.raises(ProgramFileError, match="nested blocks"):
        file.to_bytes(_loops(MAX_DEPTH + 1))
    loop = split(file.to_bytes(_loops(2)))[b"CODE"][1:3]  # after the count of blocks: block code, trips
    with pytest.raises(ProgramFileError, match=f"more than {MAX_DEPTH} deep"):
        file.from_bytes(forge(split(file.to_bytes(program_of())) | {b"CODE": b"\1" + (loop + b"\1") * 100_000}))


# ---- what cannot be written


UNWRITABLE = {
    "a NumPy immediate": (program_of(Splat(TILE, np.float32(1))), "constant.value"),  # type: ignore[arg-type]
    "a float address": (program_of(Splat(dataclasses.replace(TILE, address=1.5), 1)), "Tile.address"),
    "an unknown space": (program_of(Splat(dataclasses.replace(TILE, space="l2"), 1)), "Tile.space"),
    "a tile of rank 7": (program_of(Splat(dataclasses.replace(TILE, axes=(TileAxis(1),) * 7), 1)), "Tile.axes"),
    "a list for a tuple": (dataclasses.replace(program_of(), buffers=[]), "Program.buffers"),
    "a huge integer": (program_of(Splat(TILE, 2**63)), "constant.value"),
    "an undeclared sub-operation": (program_of(INSTRUCTIONS[0x12]("cosh", TILE, TILE)), "unary.op"),  # type: ignore[call-arg]
    "no instruction": (program_of("halt"), "an instruction"),  # type: ignore[arg-type]
    "no block": (program_of(blocks=("halt",)), "Program.code"),  # type: ignore[arg-type]
    "half the source lines": (
        program_of(blocks=(Kernel((), (), (), (Splat(TILE, 1),) * 2, (), sources=("x.py:1",)),)),
        "1 source lines for 2 instructions",
    ),
    "too few buffer names": (dataclasses.replace(program_of(), buffer_names=("a", "b")), "2 buffer names for 1 buffers"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_has_no_place_in_a_file_is_refused_by_name(case: str) -> None:
    program, named = UNWRITABLE[case]
    with pytest.raises(ProgramFileError, match=f"cannot write the program: .*{named}"):
        file.to_bytes(program)


# ---- files


@pytest.mark.parametrize("name", HAND)
def test_the_size_of_code_is_that_of_a_file_without_names_and_constants(name: str) -> None:
    program = HAND[name]
    assert file.code_bytes(program) == len(file.to_bytes(program.strip())) - sum(len(c.data) for c in program.constants)


def test_a_saved_program_loads(tmp_path: Path) -> None:
    path = tmp_path / "step.tpx"
    file.save(HAND["while"], path)
    file.save(HAND["two_layer"], str(path))
    assert repr(file.load(path)) == repr(HAND["two_layer"])
    assert [p.name for p in tmp_path.iterdir()] == ["step.tpx"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "step.tpx"
    file.save(HAND["while"], path)
    monkeypatch.setattr(file.os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        file.save(HAND["loop"], path)
    assert [p.name for p in tmp_path.iterdir()] == ["step.tpx"]
    assert file.load(path) == HAND["while"]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "step.tpx"
    path.write_bytes(REALISTIC[:-1])
    with pytest.raises(ProgramFileError, match=r"step\.tpx: cut short: found \d+ bytes, expected \d+"):
        file.load(path)
