"""What a declaration does not say is refused by name wherever it must be known, and what the instruction set declares is known there."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests import programs
from tests.program_builder import edit_kernel, substitute
from tpuflow.chips import get_chip
from tpuflow.device.fast import liveness
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.halos import halos_of
from tpuflow.device.fast.lift import HANDLERS, handler_of
from tpuflow.device.fast.positions import CannotLift
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.reference.execute import _TRANSFERS
from tpuflow.device.resolved import resolve
from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.program import time_kernel
from tpuflow.device.verify import verify
from tpuflow.device.verify.budget import VerifyBudget
from tpuflow.device.verify.instructions import _FIELD_RULES, check_fields, check_operands
from tpuflow.device.verify.kernels import check_kernel
from tpuflow.errors import HazardError, ProgramError
from tpuflow.isa import elementwise, kernel_forms
from tpuflow.isa import instruction as field
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.core_shares import divide_kernel
from tpuflow.isa.cost import Cost
from tpuflow.isa.instruction import BY_MNEMONIC, CUSTOM_OPCODES, INSTRUCTIONS, TRAITS, FieldKind, Instruction, Tile, Window, instr
from tpuflow.isa.kernel_forms import forms_of
from tpuflow.isa.program import SECTIONS, GridAxis, Kernel, Program
from tpuflow.isa.refusal import Refusal
from tpuflow.isa.vector import Binary, ReduceInto, _Compute
from tpuflow.isa.wire import choice_codec

CHIP = get_chip("generic")
MACHINE = Machine.of(CHIP)
OPCODE = CUSTOM_OPCODES.start
EVERY = list(INSTRUCTIONS.values())
PROGRAMS = (
    programs.map_program, programs.reduce_program, programs.matmul_program, programs.conv_program, programs.take_program,
    programs.scatter_program, programs.cumulative_program, programs.sort_program, programs.loop_program,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _planted() -> Iterator[None]:
    yield
    for planted in INSTRUCTIONS.keys() - {cls.opcode for cls in EVERY}:
        del BY_MNEMONIC[INSTRUCTIONS.pop(planted).mnemonic]


def _average(*traits: str) -> type[Instruction]:
    """A new instruction of two operands, complete but for what `traits` leaves out."""

    @instr(OPCODE, "average", *traits)
    class Average(_Compute):
        """dst = (a + b) / 2."""

        dst: Tile = field.dst()
        a: Tile = field.src()
        b: Tile = field.src()

        def meaning(self, ar: Any, trip: Any, a: Any, b: Any) -> Any:
            half = ar.full(a.shape, 0.5, self.a.dtype)
            return ar.binary("mul", ar.binary("add", a, b, self.a.dtype), half, self.a.dtype)

    return Average


def _with(cls: Any, program: Program) -> Program:
    """The program with its additions replaced."""
    change = lambda i: cls(i.dst, i.a, i.b) if isinstance(i, Binary) else i  # noqa: E731
    return edit_kernel(program, lambda kernel: substitute(kernel, change))


def _kernel(program: Program) -> Kernel:
    return next(program.kernels())


PLACES: dict[str, Callable[[Program], object]] = {
    "verifier": verify,
    "verifier of one kernel": lambda p: check_kernel(_kernel(p), p.buffers, p.chip, VerifyBudget(99)),
    "resolve": lambda p: resolve(_kernel(p)),
    "liveness of reads": lambda p: liveness.reads(_kernel(p)),
    "liveness of writes": lambda p: liveness.writes(_kernel(p)),
    "lifting": lambda p: [handler_of(i) for i in _kernel(p).instructions],
    "fast engine": lambda p: list(FastEngine(p, verified=True).translate()),
    "reference engine": lambda p: ReferenceEngine(p, verify=False).launch([np.ones((20, 300), np.float32)] * 2, []),
    "timing": lambda p: time_kernel(_kernel(p), MACHINE),
    "form": lambda p: forms_of([_kernel(p)]),
    "core division": lambda p: divide_kernel(_kernel(p), CHIP),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_instruction_that_states_nothing_is_refused_everywhere_by_name(place: str) -> None:
    program = _with(_average(), programs.map_program())
    with pytest.raises((ProgramError, Refusal, HazardError), match="'average'"):
        PLACES[place](program)


@pytest.mark.parametrize("traits", [("accumulates",), ("permutes",), ("scans",), ("sorts",), ("fills",)])
def test_an_instruction_with_no_rule_for_what_it_states_is_not_lifted(traits: tuple[str, ...]) -> None:
    program = _with(_average(*traits), programs.map_program())
    with pytest.raises(CannotLift, match="'average' has no lift rule"):
        PLACES["lifting"](program)
    with pytest.raises(ProgramError, match="kernel .*'average' has no lift rule"):
        PLACES["fast engine"](program)


@pytest.mark.parametrize("traits", [("elementwise",), ("permutes",)])
def test_an_instruction_without_operand_rules_is_refused_by_the_verifier(traits: tuple[str, ...]) -> None:
    with pytest.raises(ProgramError, match="'average' has no operand rules"):
        verify(_with(_average(*traits), programs.map_program()))


def test_an_instruction_stated_to_be_elementwise_is_lifted_by_its_meaning() -> None:
    program = _with(_average("elementwise"), programs.map_program())
    x, y = np.random.default_rng(0).standard_normal((2, 20, 300)).astype(np.float32)
    outputs = FastEngine(program, fidelity="bitexact", verified=True).once([x, y])
    np.testing.assert_array_equal(np.asarray(outputs[0]), (x + y) * np.float32(0.5))


def test_an_instruction_that_does_not_say_what_it_costs_is_not_timed() -> None:
    @instr(OPCODE, "free", "elementwise")
    class Free(Instruction):
        """dst = a."""

        dst: Tile = field.dst()
        a: Tile = field.src()
        b: Tile = field.src()

        @property
        def queue(self) -> str:
            return "vector"

    with pytest.raises(ProgramError, match="'free' does not declare what it costs"):
        time_kernel(_kernel(_with(Free, programs.map_program())), MACHINE)


def test_multiply_adds_of_an_unknown_type_are_not_counted() -> None:
    @instr(OPCODE, "fma", "elementwise")
    class Fma(_Compute):
        """dst = a * b + 1."""

        dst: Tile = field.dst()
        a: Tile = field.src()
        b: Tile = field.src()

        def cost(self, chip: Any, shape_of: Any) -> Cost:
            return Cost(cycles=1, macs=1)

    with pytest.raises(ProgramError, match="'fma' costs multiply-adds"):
        time_kernel(_kernel(_with(Fma, programs.map_program())), MACHINE)


def test_a_new_accumulator_is_shared_out_by_what_it_states() -> None:
    @instr(OPCODE, "add_up", "accumulates")
    class AddUp(_Compute):
        """total = total + a, summed over axes."""

        total: Tile = field.inout()
        a: Tile = field.src()
        axes: tuple[int, ...] = field.axes_field()

    @instr(OPCODE + 1, "follow", "scans")
    class Follow(_Compute):
        """total = what comes after it by a."""

        total: Tile = field.inout()
        a: Tile = field.src()
        axes: tuple[int, ...] = field.axes_field()

    def shared(cls: Any) -> object:
        program = programs.reduce_program((8, 3000), (8, 128))
        return divide_kernel(substitute(_kernel(program), lambda i: cls(i.acc, i.a, i.axes) if isinstance(i, ReduceInto) else i), CHIP32)

    CHIP32 = replace(CHIP, cores=32)
    known = divide_kernel(_kernel(programs.reduce_program((8, 3000), (8, 128))), CHIP32)
    assert known[0].cores_per_point > 1
    assert shared(AddUp) == known and shared(Follow) != known


# --- fields


@pytest.mark.parametrize("kind", [FieldKind("tile", "mixed"), FieldKind("tiles", "both"), FieldKind("windows", "read"), FieldKind("mask")])
def test_a_field_of_an_unknown_kind_cannot_be_declared(kind: FieldKind) -> None:
    with pytest.raises(ValueError, match=f"odd.a is a field of kind '{kind.name}' to '{kind.role}'"):

        @instr(OPCODE, "odd", "elementwise")
        class Odd(_Compute):
            """A field that nobody knows."""

            dst: Tile = field.dst()
            a: Any = dataclasses.field(metadata={"kind": kind})

    assert "odd" not in BY_MNEMONIC


def test_a_trait_that_nobody_knows_cannot_be_declared() -> None:
    with pytest.raises(ValueError, match="average states convolves"):
        _average("elementwise", "convolves")


def _masked(monkeypatch: pytest.MonkeyPatch) -> type[Instruction]:
    """An instruction with a field of a kind that only the declaration knows."""
    monkeypatch.setattr(field, "PLAIN_KINDS", (*field.PLAIN_KINDS, "mask"))

    @instr(OPCODE, "masked", "elementwise")
    class Masked(_Compute):
        """dst = a + b where the mask is set."""

        dst: Tile = field.dst()
        a: Tile = field.src()
        b: Tile = field.src()
        mask: int = dataclasses.field(default=3, metadata={"kind": FieldKind("mask")})

    return Masked


def test_a_field_of_a_kind_that_one_place_does_not_know_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _with(_masked(monkeypatch), programs.map_program())
    kernel = _kernel(program)
    (masked,) = (i for i in kernel.instructions if i.mnemonic == "masked")
    with pytest.raises(ProgramError, match="'masked' has a field mask of kind 'mask'"):
        forms_of([kernel])
    with pytest.raises(Refusal, match="field mask of 'masked' is of kind 'mask'"):
        check_fields(kernel, masked)
    with pytest.raises(ProgramError, match="'masked' has a field mask"):
        verify(program)


def _changes(instruction: Instruction) -> Iterator[Instruction]:
    """The instruction with one field after the other changed."""
    for name, kind, value in instruction.fields():
        match kind.name:
            case "tile":
                others: list[Any] = [replace(value, address=value.address + 64), replace(value, slots=value.slots + 1)]
            case "tiles":
                others = [value[:-1]]
            case "window":
                others = [replace(value, **{f.name: _other(value, f.name)}) for f in dataclasses.fields(Window) if f.name != "buffer"]
            case "choice":
                others = [next(c for c in kind.choices if c != value)]
            case "axes" | "pairs" | "bounds":
                others = [(*value, {"axes": 7, "pairs": SlidingAxis(0, 1, 1, 1), "bounds": Bound(1, ())}[kind.name])]
            case "number":
                others = [value + 1]
            case "immediate":
                others = [-value if value else -0.0, bool(value), str(value)]
            case _:
                raise AssertionError(kind)
        yield from (replace(instruction, **{name: other}) for other in others)  # type: ignore[type-var]


def _other(window: Window, name: str) -> Any:
    return {
        "tile": replace(window.tile, address=window.tile.address + 64),
        "axes": (*window.axes[:-1], replace(window.axes[-1], origin=window.axes[-1].origin + 1)) if window.axes else (None,),
        "fill": -0.0 if str(window.fill) != "-0.0" else 0.0,
    }[name]


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_forms_tell_apart_kernels_that_differ_in_any_field(make: Callable[[], Program]) -> None:
    assert {f.name for f in dataclasses.fields(Kernel) if f.compare} == {"grid", "semaphores", *SECTIONS}
    program = make()
    for kernel in program.kernels():
        kernels = [kernel, replace(kernel, grid=(*kernel.grid, GridAxis(3))), replace(kernel, semaphores=(*kernel.semaphores, 0))]
        count = 3
        for n, instruction in enumerate(kernel.instructions):
            count += len(set(map(repr, _changes(instruction))))
            for changed in _changes(instruction):
                numbers = iter(range(len(kernel.instructions)))
                kernels.append(substitute(kernel, lambda i, c=changed, k=n, it=numbers: c if next(it) == k else i))
        assert len({form.number for form in forms_of(kernels)}) == count


# --- the instruction set


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.mnemonic)
def test_every_instruction_of_the_set_is_known_everywhere(cls: type[Instruction]) -> None:
    assert cls.traits and cls.traits <= TRAITS.keys()
    assert cls in HANDLERS or cls.has("elementwise")
    assert cls.rules is not None and all(rule.sentence for rule in cls.rules)
    assert (cls in _TRANSFERS) == cls.has("transfers")
    assert (cls.meaning is Instruction.meaning) == any(map(cls.has, ("transfers", "signals", "waits")))
    assert {kind.name for kind in cls.kinds.values()} <= kernel_forms.KINDS & _FIELD_RULES.keys()
    assert cls.cost is not Instruction.cost and cls.queue is not Instruction.queue
    roles = [(kind.name, kind.role) for kind in cls.kinds.values()]
    assert (("tile", "both") in roles) == (cls.has("accumulates") or cls.has("scans"))
    assert any(name == "window" for name, _ in roles) == cls.has("transfers")


def test_every_trait_is_stated_by_some_instruction() -> None:
    assert {trait for cls in EVERY for trait in cls.traits} == TRAITS.keys()


def test_elementwise_instructions_take_tiles_of_one_shape_only() -> None:
    """What the lift takes for elementwise is what the verifier holds to equal axes."""
    for make in PROGRAMS:
        for instruction in (i for k in make().kernels() for i in k.instructions if i.has("elementwise")):
            check_operands(instruction)
            assert len({t.axes for t in (*instruction.reads(), *instruction.writes())}) == 1


def test_halo_tiles_of_an_instruction_that_states_nothing_are_refused() -> None:
    cls: Any = _average()
    kernel = _kernel(programs.conv_program())
    load = next(i for i in kernel.body if i.windowed)
    tile = load.writes()[0]
    body = tuple(x for i in kernel.body for x in ((i, cls(tile, tile, tile)) if i is load else (i,)))
    with pytest.raises(ProgramError, match="'average' states no traits"):
        halos_of(replace(kernel, body=body))


def test_an_elementwise_operation_that_the_fast_engine_does_not_know_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    added = elementwise.Operation("sinh", 20, elementwise.UNARY["exp"].on, special=True)
    monkeypatch.setattr(elementwise, "OPERATIONS", {**elementwise.OPERATIONS, "sinh": added})
    with pytest.raises(TypeError, match="operations on float that .* alone has: sinh"):
        runpy.run_module("tpuflow.device.fast.lax_elementwise")


def test_two_words_of_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match="two of the words add, sub have one number"):
        choice_codec("op", {"add": 0, "sub": 0})
