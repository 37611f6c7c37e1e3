"""The text form: the assembler reads what the disassembler writes, and says where it cannot."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import programs as hand
from tests import strategies
from tpuflow.chips import get_chip
from tpuflow.dtypes import BF16, DTYPES, F16, F32, S32, U8, DType
from tpuflow.errors import ProgramFileError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.codec import DECLARED, MAX_DEPTH
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import from_bytes, to_bytes
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, WindowAxis
from tpuflow.isa.program import Buffer, Constant, Kernel, Loop, Program, Switch, While
from tpuflow.isa.vector import Constant as Splat

HAND = hand.all_programs()

GOLDEN = """\
tpx 14.0    ; a little of everything
chip
  name "tiny"
  cores 1
  clock_hz 1000000000.0
  matrix_rows 128
  matrix_columns 128
  matrix_units 1
  vector_sublanes 8
  vector_lanes 128
  vector_units 2
  vmem_bytes 65536
  acc_bytes 4096
  smem_bytes 256
  hbm_bytes 1048576
  hbm_bytes_per_second 800000000000.0
  host_bytes_per_second 16000000000.0
  launch_seconds 0.0001
  source "this \\u{22}test\\u{22}"
buffers
  b0 f32[300, 64] at 0x0    ; x
  b1 s32[] at 0x12c00    ;
  b2 u8[3] at 0x12c40    ; über; semicolon
  b3 bf16[8, 128] at vmem[0x8000]    ; stays
constants
  b1 = s32 -1
  b2 = u8 1, 2, 255
inputs
  "x" f32[300, 64] b0 donated weak key="threefry2x32"
outputs
  "y" f32[300, 64] b0
infeeds
  "batch" f32[] b-1
code
  kernel    ; fused.1
    scope "jvp(Net)/\\u{22}fc1\\u{22}"
    grid parallel 3, sequential 4
    semaphores 2, 0
    %t0 = smem[0x4] s32[] x1 point
    %t1 = vmem[0x12000] f32[128@g0/300, 64] x1 step
    %t2 = vmem[0x2000] f32[128@g0/300, 64] x2 step
    %w0 = b1 %t0 [] fill 0
    %w1 = b0 %t2 [300:64 at -1 + 128*g0 + 2*g1 + %t0 + j, 64:1 at (3 + -1*j)/2] fill -inf
    %w2 = b0 %t1 [300:64 at 128*g0 + j, 64:1 at 0] fill 0.0
    prologue
      scalar.load %w0    ; mlp.py:1 (init)
      vector.constant %t1, value=nan    ;
    body
      load.wait semaphore=0    ; mlp.py:2
      load.load %w1    ; mlp.py:2
      vector.binary add %t1, %t2, %t1    ; mlp.py:3; y = x + y
      vector.reduce_into max %t1, %t1, axes=[0, 1], block=1    ; mlp.py:4
      vector.sort (%t1, %t2), (%t2, %t1), axis=1, keys=1    ; mlp.py:5
    epilogue
      store.store %w2    ; mlp.py:6
  while predicate=b1
    condition
      infeed port=0 buffer=b0
    body
      loop trips=b1
        body
          outfeed port=0 buffer=b0
      switch index=b1
        branch0
        branch1
          kernel
            %t0 = smem[0x0] pred[] x1 step
            body
              scalar.constant %t0, value=true
"""


def same(program: Program) -> bool:
    """Whether a Program comes back from its text; repr takes NaN for NaN, tells 0 from 0.0, and shows names."""
    text = disassemble(program)
    again = assemble(text)
    return repr(again) == repr(program) and disassemble(again) == text


# ---- the form


def test_the_text_reads_as_documented_and_comes_back_the_same() -> None:
    assert disassemble(assemble(GOLDEN)) == GOLDEN


def test_the_text_means_what_it_says() -> None:
    program = assemble(GOLDEN)
    kernel, loop = program.code
    assert isinstance(kernel, Kernel) and isinstance(loop, While)
    tile = Tile("vmem", 0x2000, F32, (TileAxis(128, 0, 300), TileAxis(64)), slots=2, rate="step")
    register = Tile("smem", 4, S32, rate="point")
    window = kernel.body[1].window  # type: ignore[attr-defined]
    assert window.axes == (
        WindowAxis(300, 64, -1, ((0, 128), (1, 2)), step=1, register=register),
        WindowAxis(64, 1, 3, step=-1, dilation=2),
    )
    assert window.tile == tile and window.fill == -math.inf
    assert (kernel.name, kernel.scope) == ("fused.1", 'jvp(Net)/"fc1"') and kernel.sources[:3] == ("mlp.py:1 (init)", "", "mlp.py:2")
    assert program.name == "a little of everything" and program.buffer_names == ("x", "", "über; semicolon", "stays")
    assert [b.space for b in program.buffers] == ["hbm", "hbm", "hbm", "vmem"]
    assert program.chip.source == 'this "test"' and program.inputs[0].key == "threefry2x32" and program.inputs[0].weak
    assert program.constants == (Constant(1, b"\xff\xff\xff\xff"), Constant(2, b"\x01\x02\xff"))
    assert isinstance(loop.body[0], Loop) and isinstance(loop.body[1], Switch) and loop.body[1].branches[0] == ()


def test_spaces_empty_lines_and_comment_lines_are_free() -> None:
    loose = GOLDEN.replace(", ", " ,  ").replace("\n    body", "\n\n; a remark\n    body").replace("\n", "\r\n")
    assert loose != GOLDEN and disassemble(assemble(loose)) == GOLDEN


# ---- round trips


@settings(max_examples=60)
@given(strategies.programs())
def test_every_program_survives_a_round_trip_through_text(program: Program) -> None:
    assert same(program)


@pytest.mark.parametrize("cls", DECLARED, ids=lambda cls: cls.mnemonic)
def test_every_instruction_survives_a_round_trip_through_text(cls: type[Instruction]) -> None:
    @settings(max_examples=10)
    @given(strategies.instructions_of(cls))
    def check(instruction: Instruction) -> None:
        assert same(Program(get_chip("generic"), (), (), (), (), (), (), (Kernel((), (), (), (instruction,), ()),)))

    check()


@pytest.mark.parametrize("name", HAND)
def test_hand_built_programs_survive_equal_and_to_the_same_bytes(name: str) -> None:
    program = HAND[name]
    again = assemble(disassemble(program))
    assert again == program and same(program) and same(program.strip())
    assert to_bytes(again) == to_bytes(program)
    assert disassemble(from_bytes(to_bytes(program))) == disassemble(program)


@given(st.sampled_from(DTYPES), st.binary(max_size=80), st.integers(-1, 1))
def test_every_constant_survives_a_round_trip_through_text(dtype: DType, data: bytes, buffer: int) -> None:
    program = Program(get_chip("generic"), (Buffer(dtype, (), 0),), (Constant(buffer, data),), (), (), (), (), ())
    assert same(program)


@pytest.mark.parametrize(
    ("dtype", "data", "shown"),
    [
        (F32, np.float32([0.1, -0.0, 1e-45]).tobytes(), "b0 = f32 0.10000000149011612, -0.0, 1.401298464324817e-45"),
        (F16, np.float16([np.inf, np.nan]).tobytes(), "b0 = f16 inf, nan"),
        (F32, b"\x01\x00\xa0\x7f", "b0 = hex\n    0100a07f"),  # a signalling NaN
        (F32, b"\x01\x00\xc0\xff", "b0 = f32 nan:fff8000020000000"),
        (BF16, b"\x80\x3f", "b0 = bf16 1.0"),
        (S32, np.arange(17, dtype=np.int32).tobytes(), "b0 = hex\n    00000000010000000200"),
        (U8, b"", "b0 = hex\n"),
        (S32, b"\x01", "b0 = hex\n    01"),
    ],
)
def test_constants_are_numbers_where_short_and_exact_and_bytes_otherwise(dtype: DType, data: bytes, shown: str) -> None:
    program = Program(get_chip("generic"), (Buffer(dtype, (), 0),), (Constant(0, data),), (), (), (), (), ())
    assert shown in disassemble(program) + "\n"
    assert assemble(disassemble(program)) == program


@given(st.text(st.characters(), max_size=12), st.text(st.characters(), max_size=12))  # surrogates and control characters too
def test_names_and_source_lines_survive_whatever_they_hold(source: str, name: str) -> None:
    splat = Splat(Tile("smem", 0, F32), 1)
    kernel = Kernel((), (), (), (splat,), (), name=name, sources=(source,))
    chip = dataclasses.replace(get_chip("generic"), source=source)
    program = Program(chip, (Buffer(F32, (), 0),), (), (), (), (), (), (kernel,), name=source, buffer_names=(name,))
    assert same(program)
    assert disassemble(program).count("\n") == disassemble(program.strip()).count("\n") + bool(source), "the chip's source is a line"
    assert repr(from_bytes(to_bytes(program))) == repr(program)


def test_incomplete_source_lines_cannot_be_shown() -> None:
    (kernel,) = HAND["map"].code
    assert isinstance(kernel, Kernel)
    program = dataclasses.replace(HAND["map"], code=(dataclasses.replace(kernel, sources=("mlp.py:1",)),))
    with pytest.raises(ProgramFileError, match="1 source lines"):
        disassemble(program)


# ---- errors: (what to replace in the golden text, by what, the message); @ marks the place that the message must name

MARK = "\0"

FAULTS = {
    "version": ("tpx 14.0", "tpx @15.0", "found '15.0', expected a version from 14.0 to 14.0"),
    "no_program": ("tpx 14.0", "@HloModule", "found 'HloModule', expected 'tpx 14.0'"),
    "chip_fact": ("  cores 1\n  clock", "  @clock", "found 'clock_hz', expected the chip's 'cores'"),
    "chip_value": ("cores 1", "cores @one", "found 'one', expected an integer"),
    "string": ('name "tiny"', 'name @"tiny', "found '\"tiny', expected a string in double quotes"),
    "element_type": ("b0 f32[300, 64] at", "b0 @f64[300, 64] at", "found 'f64', expected one of f32, f16"),
    "buffer_number": ("b1 s32[] at", "@b2 s32[] at", "found 'b2', expected 'b1': buffers are numbered from 0 without gaps"),
    "shape": ("b0 f32[300, 64] at", "b0 f32[300@: 64] at", "found ':', expected ']'"),
    "value_range": ("u8 1, 2, 255", "u8 @1, 2, 256", "found '1', expected values that fit in u8"),
    "hex": ("b1 = s32 -1", "b1 = hex\n    @0g", "found '0g', expected hexadecimal bytes"),
    "odd_hex": ("b1 = s32 -1", "b1 = hex\n    00@0", "found '0', expected ';'"),
    "space": ("= vmem[0x2000]", "= @hbm[0x2000]", "found 'hbm', expected one of vmem, smem, acc"),
    "rate": ("x2 step\n", "x2 @trip\n", "found 'trip', expected one of step, point"),
    "rank": ("f32[128@g0/300, 64] x2", "f32[1, 1, 1, 1, 1, 1, 1] @x2", "at most 6 items before this place, not 7"),
    "twice": ("%t1 = vmem", "@%t0 = vmem", "found '%t0', expected a name that is not defined above"),
    "term_order": ("-1 + 128*g0 + 2*g1", "128*g0 + @-1 + 2*g1", "found '-1', expected terms in the order origin, grid"),
    "unknown_tile": ("b1 %t0 []", "b1 @%t7 []", "found '%t7', expected a tile of this kernel"),
    "unknown_window": ("load.load %w1", "load.load @%w9", "found '%w9', expected a window of this kernel"),
    "tile_for_window": ("load.load %w1", "load.load @%t2", "found '%t2', expected a window of this kernel"),
    "mnemonic": ("vector.binary", "vector.@binray", "found 'binray', expected a mnemonic. Did you mean 'binary'?"),
    "sub_operation": ("binary add", "binary @plus", "found 'plus', expected one of add, sub, mul"),
    "queue": ("vector.binary", "@matrix.binary", "found 'matrix.binary', expected vector.binary for these operands"),
    "no_queue": ("vector.binary", "@gpu.binary", "found 'gpu.binary', expected one of scalar, matrix"),
    "operand_missing": ("%t2, %t1    ; mlp.py:3", "%t2    @; mlp.py:3", "found the end of the line, expected ','"),
    "operand_extra": ("%t2, %t1    ; mlp.py:3", "%t2, %t1@, %t1    ; mlp.py:3", "found ',', expected ';'"),
    "field_name": ("axes=[0, 1]", "@axis=[0, 1]", "found 'axis', expected 'axes'"),
    "negative": ("axes=[0, 1]", "axes=[0, @-1]", "found '-1', expected a non-negative integer"),
    "no_tiles": ("sort (%t1, %t2)", "sort @()", "found '(', expected at least one tile"),
    "big_integer": ("trips=b1", "trips=b@99999999999999999999", "found '99999999999999999999', expected an integer of at most 64 bits"),
    "bigger_integer": ("trips=b1", "trips=b@" + "9" * 5000, "9...', expected an integer"),
    "block": ("  while predicate", "  @until predicate", "found 'until', expected one of kernel, loop, while"),
    "indentation": ("      infeed port", "       @infeed port", "found 'infeed', expected this line to start at column 7"),
    "tab": ("      infeed port", "@\tinfeed port", r"found '\t', expected 'body' at column 5"),
    "missing_list": ("    condition\n      infeed", "      @infeed", "found 'infeed', expected 'condition' at column 5"),
    "leftover": ("outputs\n", "@exports\n", "found 'exports', expected the end of the text, or one of the sections"),
    "escape": ("mlp.py:6", "@\\u{110000}", "expected a character code up to 10ffff"),
}
UNPLACED = {
    "sources": (
        "    ; mlp.py:4",
        "",
        "step.txt:35: instructions of this kernel: found 7 comments on 8 lines, expected one on every",
    ),
    "buffer_names": ("    ; x\n", "\n", "step.txt: buffers: found 3 comments on 4 lines"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_line_column_found_and_expected(fault: str) -> None:
    old, new, message = FAULTS[fault]
    marked = GOLDEN.replace(old, new.replace("@", MARK), 1)
    before = marked[: marked.index(MARK)]
    place = f"step.txt:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}: "
    with pytest.raises(ProgramFileError) as caught:
        assemble(marked.replace(MARK, ""), name="step.txt")
    assert str(caught.value).startswith(place) and message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("fault", UNPLACED)
def test_debug_comments_are_all_there_or_none(fault: str) -> None:
    old, new, message = UNPLACED[fault]
    with pytest.raises(ProgramFileError, match=message):
        assemble(GOLDEN.replace(old, new, 1), name="step.txt")


def test_leading_zeros_change_no_integer() -> None:
    assert to_bytes(assemble(GOLDEN.replace("matrix_rows 128", "matrix_rows 000128"))) == to_bytes(assemble(GOLDEN))


@pytest.mark.parametrize("text", ["", "\n\n", "; only a comment\n"])
def test_an_empty_text_is_refused(text: str) -> None:
    with pytest.raises(ProgramFileError, match="found the end of the text, expected 'tpx 14.0'"):
        assemble(text)


def test_a_text_cut_after_any_line_is_a_program_or_a_clear_error() -> None:
    lines = GOLDEN.splitlines(keepends=True)
    for length in range(len(lines)):
        accepted("".join(lines[:length]))


def test_blocks_nest_to_the_limit_and_no_further() -> None:
    head = GOLDEN[: GOLDEN.index("code\n")] + "code\n"

    def loops(depth: int) -> str:
        return head + "".join(f"{'  ' * (2 * i + 1)}loop trips=b1\n{'  ' * (2 * i + 2)}body\n" for i in range(depth))

    assert disassemble(assemble(loops(MAX_DEPTH))) == loops(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 2000):
        with pytest.raises(ProgramFileError, match=f"at most {MAX_DEPTH} nested blocks"):
            assemble(loops(depth))


def accepted(text: str) -> bool:
    """Whether a text is a program; any exception but ProgramFileError passes through and fails the test."""
    try:
        assemble(text)
    except ProgramFileError as error:
        assert re.search("found .*expected|nested", str(error), re.DOTALL)
        return False
    return True


PIECES = re.split(r"(\W)", GOLDEN)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(PIECES) - 1), st.sampled_from(PIECES) | st.text(max_size=3)), min_size=1, max_size=3))
def test_a_mangled_text_is_a_program_or_a_clear_error(changes: list[tuple[int, str]]) -> None:
    pieces = list(PIECES)
    for at, piece in changes:
        pieces[at] = piece
    accepted("".join(pieces))


@given(st.text(max_size=60))
def test_any_other_text_is_refused(text: str) -> None:
    assume(not text.lstrip().startswith("tpx"))
    assert not accepted(text)
