"""The command line `tpuflow`: its commands, their options, and the functions that run them.

Only the commands that compile (`compile`, `estimate`, `check`, `compare`, `calibrate`, `doctor`) import the compiler, Flax or Optax.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tpuflow import __version__
from tpuflow.archives import check_names, read_inputs, storable, write_arrays
from tpuflow.chips import CHIPS
from tpuflow.chips.listing import chip_facts, chip_table
from tpuflow.errors import ConfigError, LaunchAbandoned, ProgramFileError, TpuflowError, nothing_at
from tpuflow.garbage import last_work, undisturbed
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import load, save
from tpuflow.isa.summary import summary
from tpuflow.reports.differences import diff
from tpuflow.reports.files import write_json

MISSING_PATH_ADVICE = "Make it, or give another path."
INTERRUPTED = 130  # what a shell gives for a process that SIGINT ended
CHECK = "whether a step fits, overflows or underflows (with data), how long it is and what would help, on one page"
COMPARE = "a step as tpuflow and as XLA:TPU compile it for the same chip, by layer (needs the package libtpu, and no TPU)"
TARGET = (
    "module:function or file.py:function; called with the batch size it gives (function, *shapes), or (model, batch) for a training step, "
    "or a StepConfig for one with options of its own"
)
DIFF = "what differs between two reports of a step: settings, time, memory, and the layers that take longer or shorter, with causes"
STANDARD_OUTPUT = Path("-")
OUTPUT_OPTIONS = ("json", "html", "trace", "plot", "pareto", "output", "outputs")
"""Options that name files to be written."""
ESTIMATE = "the modelled time and memory of a step on a chip, from shapes alone; nothing is run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; returns the exit status.

    Expected errors become one line on stderr and status 2, Ctrl-C status 130; `check` and `doctor` return 1 for a bad result. An error in
    the user's own function is printed with the lines of their code that it came through.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what the terminal's encoding has no place for
        sys.stdout.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(arguments)
    try:
        _check_folders(args)
        return args.command(args) or 0
    except BrokenPipeError:  # whoever read our output has had enough of it (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at the end has somewhere to go
        return 1
    except (TpuflowError, OSError) as error:
        absent = error.filename if isinstance(error, FileNotFoundError) else None
        text = f"{nothing_at(absent)} {MISSING_PATH_ADVICE}" if absent else error
        print(f"tpuflow {args.name}: {text}", file=sys.stderr)
        return 2
    except LaunchAbandoned:
        print(f"tpuflow {args.name}: interrupted in the middle of a launch", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # an ordinary end of the process would wait for the launch
    except KeyboardInterrupt:
        print(f"tpuflow {args.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not (lines := _user_lines(error)):
            raise  # a defect of ours, with all that helps to find it
        text = "".join(f"\n  in {line}" for line in lines)
        print(f"tpuflow {args.name}: {type(error).__name__}: {error}{text}", file=sys.stderr)
        return 2


def _user_lines(error: Exception) -> Sequence[Any]:
    """The lines of the user's own program that an error comes from."""
    from tpuflow.jaxprs.compat import user_lines  # loads JAX

    return user_lines(error)


def _check_folders(args: argparse.Namespace) -> None:
    """Check that the folders of all output files exist, before any work is done.

    Raises:
      ConfigError: one does not exist.
    """
    for name in OUTPUT_OPTIONS:
        path = getattr(args, name, None)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{name}: {nothing_at(path)} {MISSING_PATH_ADVICE}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tpuflow", description="Run and inspect Programs of the simulated device.")
    parser.add_argument("--version", action="version", version=f"tpuflow {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")
    for add in (
        _add_run,
        _add_estimate,
        _add_check,
        _add_compare,
        _add_diff,
        _add_calibrate,
        _add_compile,
        _add_files,
        _add_chips_and_doctor,
    ):
        add(commands)
    return parser


def _command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int | None], text: str, *, file: str = "", more: str = ""
) -> argparse.ArgumentParser:
    """Add a command; `more` is appended to its text in the command's own help."""
    sub = commands.add_parser(name, help=text, description=text + more)
    if file:
        sub.add_argument("file", type=Path, help=file)
    sub.set_defaults(command=command)
    return sub


def _add_json(sub: argparse.ArgumentParser, what: str) -> None:
    text = f"write {what} as JSON to a file, or to standard output instead of the text if none is named"
    sub.add_argument("--json", type=Path, nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=text)


def _add_mesh(sub: argparse.ArgumentParser) -> None:
    """Options of a training on several chips."""
    sub.add_argument("--mesh", type=_axis, nargs="+", metavar="AXIS=CHIPS", help="train a model on several chips: the axes of a mesh, such "
        "as data=16 (default: as a StepConfig says, else one chip)")  # fmt: skip
    sub.add_argument("--sharding", metavar="STAGE", help="what each chip of the mesh holds: ddp, zero1, zero2 or zero3; rules for "
        "parameters are given by a StepConfig (default: as it says, else ddp)")  # fmt: skip


def _mesh(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a training on several chips that were given."""
    return {**({"mesh": dict(args.mesh)} if args.mesh else {}), **({"sharding": args.sharding} if args.sharding else {})}


def _axis(text: str) -> tuple[str, int]:
    """An axis and its chips out of AXIS=CHIPS."""
    name, _, chips = text.rpartition("=")
    if not name or not chips.isdecimal() or int(chips) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an axis and how many chips it has, such as data=16")
    return name, int(chips)


def _add_run(commands: Any) -> None:
    """`tpuflow run` and its options."""
    run = _command(commands, "run", _run, "run a saved Program once", file="a .tpx file")
    run.add_argument(
        "--inputs", type=Path, nargs="+", default=[], metavar="X.npz",
        help="input arrays by port name, in one file or several (not needed if the Program has none)",
    )  # fmt: skip
    run.add_argument("--outputs", type=Path, metavar="Y.npz", help="write outputs by port name here (default: print them)")
    run.add_argument("--engine", choices=("fast", "reference"), default="fast", help="fast: XLA:CPU; reference: tile by tile, all checks")
    run.add_argument(
        "--fidelity", choices=("native", "bitexact"), default="native", help="bitexact: the device's arithmetic to the last bit"
    )
    run.add_argument(
        "--calibration", metavar="FILE.toml", help="the timing model's fitted constants (default: what tpuflow has for the chip)"
    )
    run.add_argument("--max-work", type=int, metavar="N", help="refuse more than N tile instructions (default: 2^44)")
    run.add_argument("--max-memory", type=int, metavar="BYTES", help="refuse more than so much host memory (default: what the host has)")


def _add_estimate(commands: Any) -> None:
    """`tpuflow estimate` and its options."""
    estimate = _command(commands, "estimate", _estimate, ESTIMATE, more=". Several values for an option make a table of all.")
    estimate.add_argument("target", nargs="+", help=TARGET)
    estimate.add_argument("--batch", type=int, nargs="+", default=[32], help="batch sizes (default: 32)")
    estimate.add_argument("--chip", nargs="+", default=["generic"], help="chips' names, or .toml files with rows of one's own")
    estimate.add_argument(
        "--policy", nargs="+", default=[None], help="precisions: fp32, fp16, mixed, ... (default: as the function is written)"
    )
    estimate.add_argument("--sink-size", type=int, nargs="+", default=[100], help="training steps a round trip; 0 sinks nothing, -1 an "
        "epoch (default: 100)")  # fmt: skip
    estimate.add_argument("--calibration", nargs="+", default=[], metavar="FILE.toml", help="the timing model's fitted constants, as "
        "`tpuflow calibrate -o` writes them, one file for each family of chips (default: what tpuflow has)")  # fmt: skip
    estimate.add_argument("--price", nargs="+", type=_price, default=[], metavar="CHIP=DOLLARS", help="what chips cost an hour, for the "
        "table and --pareto")  # fmt: skip
    _add_mesh(estimate)
    estimate.add_argument("--steps-per-epoch", type=int, metavar="N", help="how long an epoch is, for --sink-size -1")
    estimate.add_argument("--kernels", type=int, default=10, metavar="N", help="show the N kernels that take longest (default: 10)")
    estimate.add_argument("--json", type=Path, help="write everything here too: figures, layers, kernels, queues, memory")
    estimate.add_argument("--trace", type=Path, metavar="STEP.json", help="write a Chrome trace here, for ui.perfetto.dev")
    estimate.add_argument("--html", type=Path, metavar="REPORT.html", help="write one self-contained page here")
    estimate.add_argument("--plot", type=Path, metavar="SWEEP.png", help="draw time, rate and memory over what varies (needs matplotlib)")
    estimate.add_argument("--pareto", type=Path, metavar="FRONT.png", help="draw memory, energy and price against time (needs matplotlib)")


def _add_check(commands: Any) -> None:
    """`tpuflow check` and its options."""
    check = _command(commands, "check", _check, CHECK, more=". Exit status 1 if it does not fit or overflows.")
    check.add_argument("target", help=f"{TARGET}; with arrays in the place of shapes its numbers are looked at too")
    check.add_argument("--batch", type=int, default=32, help="batch size (default: 32)")
    check.add_argument("--chip", default="generic", help="a chip's name, or a .toml file with a row of one's own")
    check.add_argument("--policy", help="precision: fp32, fp16, mixed, ... (default: as the function is written; fp32 for a model)")
    check.add_argument("--sink-size", type=int, metavar="N", help="training steps a round trip (default: 100)")
    check.add_argument("--calibration", metavar="FILE.toml", help="the timing model's fitted constants (default: what tpuflow has)")
    check.add_argument("--compare", nargs="*", metavar="POLICY", help="precisions to estimate besides (default: bf16 mixed)")
    check.add_argument("--html", type=Path, metavar="REPORT.html", help="write one self-contained page here")
    _add_json(check, "everything")


def _add_compare(commands: Any) -> None:
    """`tpuflow compare` and its options."""
    beside = _command(commands, "compare", _compare, COMPARE)
    beside.add_argument("target", help=TARGET)
    beside.add_argument("--batch", type=int, default=32, help="batch size (default: 32)")
    beside.add_argument("--chip", default="tpu-v5e", help="tpu-v2 to tpu-v7x (default: tpu-v5e)")
    beside.add_argument("--policy", help="precision: fp32, mixed_bf16, ... (default: as the function is written; fp32 for a model)")
    _add_mesh(beside)
    beside.add_argument("--layers", type=int, default=12, metavar="N", help="show the N layers that differ most (default: 12)")
    beside.add_argument("--html", type=Path, metavar="COMPARISON.html", help="write one self-contained page here")
    _add_json(beside, "everything")


def _add_diff(commands: Any) -> None:
    """`tpuflow diff` and its options."""
    differ = _command(commands, "diff", _diff, DIFF)
    differ.add_argument("before", type=Path, help="what `tpuflow estimate ... --json FILE` writes of one step")
    differ.add_argument("after", type=Path, help="another such file: another policy, chip, batch size, model or version")
    differ.add_argument("--layers", type=int, default=12, metavar="N", help="show the N layers that differ most (default: 12)")
    differ.add_argument("--html", type=Path, metavar="DIFF.html", help="write one self-contained page here")
    _add_json(differ, "everything")


def _add_calibrate(commands: Any) -> None:
    """`tpuflow calibrate` and its options."""
    calibrate = _command(commands, "calibrate", _calibrate, "fit the timing model's constants for a family of chips to measured step times",
        file="a CSV with the columns target (module:function), batch, chip, milliseconds and, if wanted, policy, sink_size, model"
    )  # fmt: skip
    calibrate.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help="write the constants here, for --calibration")


def _add_compile(commands: Any) -> None:
    """`tpuflow compile` and its options."""
    make = _command(commands, "compile", _compile, "compile a StableHLO module to a .tpx file",
        file="MLIR text or bytecode, a portable artifact, or a serialized jax.export.Exported"
    )  # fmt: skip
    make.add_argument("--chip", default="generic", help="a chip's name, or a .toml file with a row of one's own")
    make.add_argument("-o", "--output", type=Path, metavar="FILE.tpx", help="the file to write (default: the module's name with .tpx)")


def _add_files(commands: Any) -> None:
    """`tpuflow info`, `disassemble` and `assemble`."""
    _command(commands, "info", _info, "say what a saved Program is: chip, signature, memory, instructions", file="a .tpx file")
    show = _command(commands, "disassemble", _disassemble, "print a saved Program as text", file="a .tpx file")
    show.add_argument("-o", "--output", type=Path, help="write the text here instead")
    make = _command(commands, "assemble", _assemble, "make a .tpx file from text", file="text as `tpuflow disassemble` prints it")
    make.add_argument("-o", "--output", type=Path, required=True, help="the .tpx file to write")


def _add_chips_and_doctor(commands: Any) -> None:
    """`tpuflow chips` and `tpuflow doctor`."""
    _add_json(
        _command(
            commands, "chips", _chips, "list the chips of the catalogue: cores, matrix peaks, memories, and where the numbers are from"
        ),
        "the list",
    )
    _add_json(
        _command(commands, "doctor", _doctor, "say whether what tpuflow stands on is there and works; exit status 1 if not"), "the findings"
    )


def _price(text: str) -> tuple[str, float]:
    """A chip and dollars an hour out of CHIP=DOLLARS."""
    chip, _, dollars = text.rpartition("=")
    try:
        price = float(dollars)
    except ValueError:
        price = 0.0
    if not chip or not 0 < price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a chip and dollars an hour, such as tpu-v3=2.2")
    return chip, price


def _run(args: argparse.Namespace) -> None:
    from tpuflow.device.limits import MOST_WORK, Limits
    from tpuflow.device.runtime import Executable  # the engines are loaded only where something runs
    from tpuflow.device.timing import get_calibration

    calibration = None if args.calibration is None else get_calibration(args.calibration)
    limits = Limits(MOST_WORK if args.max_work is None else args.max_work, args.max_memory)
    executable = Executable.load(args.file, args.engine, args.fidelity, limits)
    if args.outputs is not None:
        check_names((p.name for p in executable.program.outputs), "output")
    arrays = read_inputs(args.inputs, executable)
    began = time.perf_counter()
    outputs = executable.run(arrays)
    print(f"ran {args.file} in {time.perf_counter() - began:.3f} s of host time", file=sys.stderr)
    print(executable.time(calibration=calibration).summary(), file=sys.stderr)
    if args.outputs is not None:
        return write_arrays(args.outputs, storable(outputs))
    for name, value in outputs.items():
        print(f"{name}: {value.dtype.name}{list(value.shape)}\n{value}")


def _estimate(args: argparse.Namespace) -> None:
    with last_work():
        from tpuflow.estimating.commands import run_estimate  # compiling needs the importers, which running a saved Program does not
        from tpuflow.estimating.sweeping import Sweep

        sweep = Sweep(
            targets=tuple(args.target),
            batches=tuple(args.batch),
            chips=tuple(args.chip),
            policies=tuple(args.policy),
            sink_sizes=tuple(args.sink_size),
            steps_per_epoch=args.steps_per_epoch,
            calibrations=tuple(args.calibration),
            prices=dict(args.price),
            several_chips=_mesh(args),
        )
        run_estimate(sweep, args.kernels, args.json, args.trace, args.html, args.plot, args.pareto)


def _check(args: argparse.Namespace) -> int:
    with undisturbed():
        from tpuflow.verdict.commands import check_target

    verdict = check_target(args.target, args.batch, args.chip, args.policy, args.sink_size, args.calibration, args.compare)
    if args.html is not None:
        verdict.html(args.html)
    _print_or_write(args.json, verdict.as_dict(), lambda: str(verdict))
    return 0 if verdict.ok else 1


def _compare(args: argparse.Namespace) -> None:
    from tpuflow.comparing.comparing import compare_target

    found = compare_target(args.target, args.batch, args.chip, args.policy, **_mesh(args))
    if args.html is not None:
        found.html(args.html)
    _print_or_write(args.json, found.as_dict(), lambda: found.to_text(args.layers))


def _diff(args: argparse.Namespace) -> None:
    found = diff(args.before, args.after)
    if args.html is not None:
        found.html(args.html)
    _print_or_write(args.json, found.as_dict(), lambda: found.to_text(args.layers))


def _calibrate(args: argparse.Namespace) -> None:
    from tpuflow.estimating.commands import run_calibrate

    run_calibrate(args.file, args.output)


def _compile(args: argparse.Namespace) -> None:
    from tpuflow.stages.modules import compile_file

    output = args.file.with_suffix(".tpx") if args.output is None else args.output
    program = compile_file(args.file, args.chip)
    save(program, output)
    print("\n".join(summary(program)[: 2 + len(program.inputs) + len(program.outputs)]))
    print(f"written to {output}")


def _chips(args: argparse.Namespace) -> None:
    _print_or_write(args.json, [chip_facts(chip) for chip in CHIPS.values()], lambda: chip_table(CHIPS.values()))


def _doctor(args: argparse.Namespace) -> int:
    from tpuflow.doctor import as_dicts, diagnose, exit_status, report

    findings = diagnose()
    _print_or_write(args.json, as_dicts(findings), lambda: report(findings))
    return exit_status(findings)


def _print_or_write(path: Path | None, data: Any, text: Callable[[], str]) -> None:
    """Print the text, and write the data as JSON to a file if one is named; for `STANDARD_OUTPUT`, print the JSON instead."""
    if path == STANDARD_OUTPUT:
        print(json.dumps(data, indent=1))
        return
    if path is not None:
        write_json(path, data)  # before the text, of which a reader may want the beginning only (`| head`)
    print(text())


def _info(args: argparse.Namespace) -> None:
    print("\n".join(summary(load(args.file))))


def _disassemble(args: argparse.Namespace) -> None:
    text = disassemble(load(args.file))
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text, encoding="utf-8")


def _assemble(args: argparse.Namespace) -> None:
    try:
        text = args.file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProgramFileError(f"{args.file}: not the text of a program: byte {error.start} is not UTF-8.") from error
    save(assemble(text, name=str(args.file)), args.output)
