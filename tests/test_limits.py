"""A launch beyond its limits is refused with both numbers, by both engines in the same words, whether counted before it or as it runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import programs
from tests.program_builder import PARALLEL, SEQUENTIAL, Builder
from tpuflow.cli import main
from tpuflow.device.budget import Budget, Work, Workload
from tpuflow.device.host_memory import total_bytes
from tpuflow.device.limits import MOST_WORK, Limits, host_bytes
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F32, PRED, S32
from tpuflow.errors import ConfigError, LaunchError, LimitError
from tpuflow.isa import vector
from tpuflow.isa.instruction import Tile, TileAxis, WindowAxis
from tpuflow.isa.program import Block, GridAxis, Kernel, Loop, Outfeed, Program, Switch, While

HUGE = dataclasses.replace(Builder().chip, name="mine", hbm_bytes=2**50, vmem_bytes=2**50)


def refusal(program: Program, inputs: Sequence[Any], limits: Limits, infeeds: Sequence[Any] = (), error: type = LimitError) -> str:
    """The words of both engines."""
    said = set()
    for engine in ("reference", "fast"):
        with pytest.raises(error) as raised:
            Executable(program, engine, "bitexact", limits).launch(inputs, infeeds)
        said.add(f"{type(raised.value).__name__}: {raised.value}")
    (words,) = said
    return words


def run(program: Program, inputs: Sequence[Any], limits: Limits, infeeds: Sequence[Any] = (), count: int | None = None) -> list[bytes]:
    """The bits of both engines, outfeeds after outputs."""
    found = []
    for engine in ("reference", "fast"):
        outputs, outfeeds = Executable(program, engine, "bitexact", limits).launch(inputs, infeeds, count=count)
        found.append([np.asarray(x).tobytes() for x in (*outputs, *outfeeds)])
    assert found[0] == found[1]
    return found[0]


def empty_grid(*sizes: tuple[int, str]) -> Program:
    """An output that is an input, and a kernel of one instruction over a grid."""
    b = Builder()
    b.output("x", b.input("x", F32))
    tile = Tile("smem", 0, F32)
    return b.program(Kernel(tuple(GridAxis(n, kind) for n, kind in sizes), (), (), (vector.Constant(tile, 1.0),), ()))


# --- work


@pytest.mark.parametrize("kind", [SEQUENTIAL, PARALLEL])
def test_a_grid_beyond_the_limit_is_refused_before_anything_runs(kind: str) -> None:
    words = refusal(empty_grid((2**20, kind), (2**30, kind)), [np.float32(0)], Limits())
    assert f"takes {2**50 + 1} tile instructions; the limit is {MOST_WORK}" in words and "--max-work" in words
    words = refusal(empty_grid(*[(2**31 - 1, kind)] * 32), [np.float32(0)], Limits())
    assert "takes about 10^299 tile instructions" in words


@pytest.mark.parametrize("name", [n for n, p in programs.all_programs().items() if not p.infeeds and n != "while"])
def test_the_closed_form_counts_what_the_reference_engine_executes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpuflow.device.reference.chip import ChipRun, Meetings
    from tpuflow.device.reference.execute import Run
    from tpuflow.device.reference.interpreter import ReferenceEngine

    program = programs.all_programs()[name]
    inputs = [
        np.asarray(3, np.int32) if p.shape == () and p.dtype == S32 else x
        for p, x in zip(program.inputs, programs.random_inputs(program), strict=True)
    ]
    executed = int(isinstance(program.code[-1], Loop))  # its trips are told of one by one
    step, blocks = Run._step, ChipRun._blocks

    def counted(self: Any, planned: Any, at: Any) -> None:
        nonlocal executed
        executed += 1
        step(self, planned, at)

    def listed(self: Any, code: Sequence[Block], path: str) -> Meetings:
        nonlocal executed
        executed += len(code) + path.endswith("body.")
        return blocks(self, code, path)

    monkeypatch.setattr(Run, "_step", counted)
    monkeypatch.setattr(ChipRun, "_blocks", listed)
    ReferenceEngine(program).launch(inputs)
    assert Workload(program).work(inputs) == Work(executed, ())


def test_a_trip_count_that_is_an_input_is_counted_at_the_launch() -> None:
    program = programs.loop_program()
    inputs = [np.asarray(3, np.int32), *programs.random_inputs(program)[1:]]
    work = Workload(program).work(inputs).least
    run(program, inputs, Limits(work=work))
    assert f"takes {work} tile instructions; the limit is {work - 1}" in refusal(program, inputs, Limits(work=work - 1))
    more = [np.asarray(2**31 - 1, np.int32), *inputs[1:]]
    assert "the limit is 1000000" in refusal(program, more, Limits(work=10**6))
    assert Workload(program).work([np.asarray(-5, np.int32), *inputs[1:]]).least < work


def test_a_loop_that_only_the_run_can_count_is_stopped_at_the_limit() -> None:
    program = programs.while_program()
    inputs = [np.float32(1.5), np.float32(100)]  # seven trips, and the condition once more
    work = Workload(program).work(inputs)
    (trip,) = work.trips
    run(program, inputs, Limits(work=work.least + 8 * trip))
    words = refusal(program, inputs, Limits(work=work.least + 8 * trip - 1))
    assert f"stopped after more than {work.least + 8 * trip - 1} tile instructions" in words
    refusal(program, [np.float32(0), np.float32(1)], Limits(work=10**5))  # zero doubled: for ever


def _endless(depth: int) -> Program:
    """While loops that never end, in the conditions and bodies of one another, and a loop whose trip count a kernel computes."""
    b = Builder()
    b.output("x", b.input("x", F32))
    more, trips, one = b.buffer(PRED), b.buffer(S32), b.constant(1, S32)
    again = programs.set_scalar(b, more, True)
    count = programs.scalar_kernel(b, [one, one], trips, lambda dst, s: vector.Binary("shl", dst, s[0], s[1]))
    code: tuple[Block, ...] = (count, Loop(trips, (again,)))
    for n in range(depth):
        code = (While((*code, again), more, ()),) if n % 2 else (While((again,), more, code),)
    return b.program(*code)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_loops_without_end_in_one_another_are_stopped(depth: int) -> None:
    assert "stopped after more than 3000" in refusal(_endless(depth), [np.float32(1)], Limits(work=3000))


def test_the_longest_branch_counts() -> None:
    program = programs.switch_program()
    inputs = [np.asarray(0, np.int32), *programs.random_inputs(program)[1:]]
    b = Builder()
    index, out = b.input("index", S32), b.new_output("out", F32)
    short, long = programs.set_scalar(b, out, 1.0), [programs.set_scalar(b, out, 1.0)] * 9
    work = Workload(b.program(Switch(index, ((short,), tuple(long))))).work([np.int32(0)]).least
    assert work == 1 + 9 * (1 + len(short.body))
    run(program, inputs, Limits(work=Workload(program).work(inputs).least))


@pytest.mark.parametrize("limit", [1, 7, 2**29, 2**29 + 1, 2**44, 2**63, 10**30])
def test_a_budget_counts_in_units_that_fit_32_bits_and_never_lets_more_through(limit: int) -> None:
    work = Work(min(limit, 5), (1, 2**40, 10**40))
    budget = Budget.of(work, limit)
    assert budget.array().dtype == np.int32 and max(budget.array().tolist()) + max(budget.trips) < 2**31
    unit = -(-limit // 2**29)
    assert budget.limit * unit <= limit and all(u * unit >= min(n, limit) for u, n in zip(budget.trips, work.trips, strict=True))
    assert budget.start <= budget.limit < budget.trips[-1]


# --- memory


def _wide_buffer() -> Program:
    b = Builder(chip=HUGE)
    b.output("x", b.input("x", F32))
    b.buffer(F32, (2**31 - 1, 2**15))
    return b.program()


def _wide_tile() -> Program:
    b = Builder(chip=HUGE)
    b.output("x", b.input("x", F32))
    return b.program(Kernel((), (), (), (vector.Constant(Tile("vmem", 0, F32, (TileAxis(2**10), TileAxis(2**31 - 1))), 1.0),), ()))


def _wide_over_the_grid() -> Program:
    """A window of eight elements that each trip of a long grid loads from elsewhere, mostly outside."""
    b = Builder()
    x, out = b.input("x", F32, (8,)), b.new_output("out", F32, (8,))
    k = programs.KernelBuilder(b, [(2**18, PARALLEL), (2**18, SEQUENTIAL)])
    tile = k.load(programs.Window(x, k.tile(F32, [8], slots=2), (WindowAxis(8, 1, 0, ((0, 8), (1, 8))),)))
    k.emit(vector.Unary("neg", tile, tile))
    k.release()
    return b.program(programs.map_kernel(b, [x], out, programs.unary("neg"), (8,)), k.kernel())


def _wide_padding() -> Program:
    b = Builder()
    x, out = b.input("x", F32, (64, 64)), b.new_output("out", F32, (8, 8))
    axes = [WindowAxis(64, 64, 2**20, ((0, 8),)), WindowAxis(64, 1, 2**20, ((1, 8),))]
    return b.program(programs.move_kernel(b, x, out, axes, (8, 8)))


WIDE = {"a buffer": _wide_buffer, "a tile": _wide_tile, "a tile over the grid": _wide_over_the_grid, "padding": _wide_padding}


@pytest.mark.parametrize("what", WIDE)
def test_memory_beyond_the_host_is_refused_whatever_the_file_says_its_chip_has(what: str) -> None:
    program = WIDE[what]()
    inputs = [np.zeros(p.shape, p.dtype.numpy) for p in program.inputs]
    words = refusal(program, inputs, Limits(memory_bytes=2**40))
    assert f"takes {host_bytes(program)} bytes of host memory; the limit is {2**40}" in words and "--max-memory" in words
    assert host_bytes(program) > 2**41


def test_memory_is_held_against_the_hosts_unless_a_limit_is_given() -> None:
    assert f"the limit is {total_bytes()}: " in refusal(_wide_buffer(), [np.float32(1)], Limits())
    small = programs.map_program()
    assert "the limit is 1000: " in refusal(small, programs.random_inputs(small), Limits(memory_bytes=1000))
    run(small, programs.random_inputs(small), Limits(memory_bytes=host_bytes(small)))


def test_items_of_feeds_count_as_memory() -> None:
    program, items = programs.feed_program(), np.zeros((50, 10, 20), np.float32)
    inputs = [np.int32(1), np.zeros((10, 20), np.float32)]
    needed = host_bytes(program) + 2 * items.nbytes
    run(program, inputs, Limits(memory_bytes=needed), [items])
    assert f"takes {needed} bytes" in refusal(program, inputs, Limits(memory_bytes=needed - 1), [items])


@pytest.mark.parametrize("wrong", [{"work": 0}, {"work": 1.5}, {"work": True}, {"memory_bytes": -1}])
def test_limits_are_positive_integers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is .*; expected a positive integer"):
        Limits(**wrong)


# --- feeds


def test_an_infeed_that_runs_dry_is_refused_alike() -> None:
    items = np.ones((3, 10, 20), np.float32)
    inputs = [np.int32(4), np.zeros((10, 20), np.float32)]
    words = refusal(programs.feed_program(), inputs, Limits(), [items], LaunchError)
    assert "an infeed has run dry" in words and "('items' 3)" in words
    run(programs.feed_program(), [np.int32(3), inputs[1]], Limits(), [items])
    run(programs.feed_program(), [np.int32(0), inputs[1]], Limits(), [items[:0]])


def test_outfeeds_hold_what_was_sent_and_no_more() -> None:
    b = Builder()
    trips, x = b.input("trips", S32), b.input("x", F32)
    program = b.program(Loop(trips, (Outfeed(b.outfeed("x", F32), x),)))
    (sent,) = run(program, [np.int32(3), np.float32(7)], Limits(), count=5)
    assert np.frombuffer(sent, np.float32).tolist() == [7, 7, 7]
    words = refusal(program, [np.int32(3), np.float32(7)], Limits(), error=LaunchError)
    assert "outfeed 'x': the program sent 3 items, with room for 1; say how many with `count`" in words


# --- the command line


def test_the_command_line_takes_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = programs.map_program()
    path, arrays = tmp_path / "map.tpx", dict(zip("xy", programs.random_inputs(program), strict=True))
    Executable(program, "reference").save(path)
    np.savez(tmp_path / "in.npz", **arrays)
    run_it = ["run", str(path), "--inputs", str(tmp_path / "in.npz"), "--engine", "reference", "--outputs", str(tmp_path / "out.npz")]
    assert main(run_it) == 0
    for option, found in (("--max-work", Workload(program).work([]).least), ("--max-memory", host_bytes(program))):
        assert main([*run_it, option, str(found)]) == 0
        capsys.readouterr()
        assert main([*run_it, option, str(found - 1)]) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(rf"tpuflow run: the launch takes {found} .*; the limit is {found - 1}: raise it with .*{option}.*\n", error)
