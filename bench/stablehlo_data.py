"""StableHLO's own test data on the simulated device: `python -m bench.stablehlo_data CHECKOUT` runs the programs of a checkout.

A file of `stablehlo/testdata` has a program, its inputs and what it is to give; one of `stablehlo/tests/interpret` several programs of
constants. Inputs become the program's arguments, what is checked its results, and the fast engine runs it. A program that has a type which
the device lacks, or a shape that is not static, is not counted. Failures are classed as those of JAX's own tests are. Nothing of the
checkout is copied.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.jax_causes import Case, cause_of, causes, counted, row
from bench.sections import put_section
from tpuflow.compiler import compile_stablehlo
from tpuflow.device.runtime import Executable
from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo, read_stablehlo
from tpuflow.lower.importers.stablehlo.module import Block, DeclaredType, ForeignType, Function, Module, Operation, Symbol

FOLDERS = ("stablehlo/testdata", "stablehlo/tests/interpret")
TITLE = "StableHLO's own test data"
SEPARATOR = "// -----"
"""Between the programs of a file."""
LEFT_OUT = (
    (re.compile(r"interpreter\."), "operations that only StableHLO's interpreter has"),
    (re.compile(r"!quant\."), "quantized types"),
    (re.compile(r"^(?!.*check\.expect)", re.DOTALL), "nothing is expected of it"),
)
"""What is in the text of a program that is not counted, and why."""
FRESH_AFTER = 50
"""Programs after which XLA's executables are let go of."""
ALMOST = 1e-3
"""Of `check.expect_almost_eq`, absolute, as StableHLO's interpreter has it."""
ULPS = 16
"""Of `check.expect_close`: units in the last place of a number; one of the array's largest number is allowed, too, as far as sums go. The
interpreter, which computes in double precision, is held to one of its own; XLA's functions of one number err by up to five in f32, and
those that are made of several by more."""


@dataclass(frozen=True, slots=True)
class Check:
    """What a program is to give: one of its results, how it is compared, and the numbers."""

    how: str
    got: int
    expected: np.ndarray


@dataclass(frozen=True, slots=True)
class Given:
    """A file's program with its inputs as arguments, the arguments, and its checks in the order of its results."""

    module: Module
    arguments: tuple[np.ndarray, ...]
    checks: tuple[Check, ...]


def programs(path: Path) -> Iterator[tuple[str, str]]:
    """The names and texts of a file's programs."""
    parts = path.read_text(encoding="utf-8").split(SEPARATOR)
    for number, text in enumerate(parts):
        yield (path.stem if len(parts) == 1 else f"{path.stem}-{number}"), text


_CONSTANT_CHECK = re.compile(
    r"check\.(expect_\w+?)_const (%[\w#]+),\s*(dense<.*?>)(?:, tolerance = \S+)? :\s+(tensor<[^\n]*>)(?: \{[^\n]*\})?", re.DOTALL
)
_CHECK = re.compile(r"check\.(expect_\w+) (%[\w#]+), (%[\w#]+)[^:\n]* : (tensor<[^\n,]*>)[^\n]*")


def _with_calls(text: str) -> str:
    """Checks as calls, which the files of the first folder have: MLIR's bindings know no dialect `check`."""
    count = iter(range(len(text)))

    def of_constant(found: re.Match[str]) -> str:
        how, got, data, kind = found.groups()
        name = f"%checked_{next(count)}"
        return f"{name} = stablehlo.constant {data} : {kind}\n  {_call(how, got, name, kind)}"

    return _CHECK.sub(lambda found: _call(*found.groups()), _CONSTANT_CHECK.sub(of_constant, text))


def _call(how: str, got: str, expected: str, kind: str) -> str:
    return f"stablehlo.custom_call @check.{how}({got}, {expected}) : ({kind}, {kind}) -> ()"


def read(text: str) -> Given:
    """A program.

    Raises:
      TpuflowError: it is no module that can be read.
      ValueError: it is not of the form that the files have.
    """
    module = read_stablehlo(_with_calls(text))
    main = next((f for f in module.functions.values() if any(map(_is_check, f.body.operations))), None)
    if main is None:
        raise ValueError("no function that calls check.*")
    known = _known(module, main.body)
    types = {v: t for op in main.body.operations for v, t in zip(op.results, op.types, strict=True)}
    checks = tuple(_checks(main.body, known))
    arguments = tuple(v for op in main.body.operations if _callee(op) == "inputs" for v in op.results)
    body = Block(
        arguments, tuple(types[v] for v in arguments),
        tuple(op for op in main.body.operations if _callee(op) not in ("inputs", "expected") and not _is_check(op)),
        tuple(c.got for c in checks), (),
    )  # fmt: skip
    kept = {name: f for name, f in module.functions.items() if name not in (main.name, "inputs", "expected")}
    program = _function(main, body, tuple(types[c.got] for c in checks))
    return Given(replace(module, functions=kept | {"main": program}), tuple(known[v] for v in arguments), checks)


def _function(main: Function, body: Block, output_types: tuple[DeclaredType, ...]) -> Function:
    return replace(
        main, name="main", body=body, output_types=output_types, argument_attributes=({},) * len(body.arguments),
        result_attributes=({},) * len(output_types), argument_names=("",) * len(body.arguments),
    )  # fmt: skip


def _callee(operation: Operation) -> str:
    symbol = operation.attributes.get("callee")
    return symbol.name if operation.name == "func.call" and isinstance(symbol, Symbol) else ""


def _is_check(operation: Operation) -> bool:
    return str(operation.attributes.get("call_target_name", "")).startswith("check.")


def _known(module: Module, block: Block) -> dict[int, Any]:
    """The arrays of @inputs and @expected, which are functions of constants, and of the constants beside them."""
    known = _constants(block)
    for operation in block.operations:
        if (name := _callee(operation)) in ("inputs", "expected"):
            body = module.functions[name].body
            constants = _constants(body)
            known |= {v: constants[of] for v, of in zip(operation.results, body.outputs, strict=True)}
    return known


def _constants(block: Block) -> dict[int, Any]:
    return {op.results[0]: op.attributes["value"] for op in block.operations if op.name == "stablehlo.constant"}


def _checks(block: Block, known: dict[int, Any]) -> Iterator[Check]:
    for operation in filter(_is_check, block.operations):
        got, expected = operation.operands
        yield Check(operation.attributes["call_target_name"].removeprefix("check."), got, known[expected])


def lacking(given: Given) -> str:
    """The first type in a program that the device has not; "" if it has all."""
    types = (t for function in given.module.functions.values() for t in _types(function.body))
    return next((f"{t}: {t.problem}" for t in types if isinstance(t, ForeignType)), "")


def _types(block: Block) -> Iterator[DeclaredType]:
    yield from block.types
    for operation in block.operations:
        yield from operation.types
        for inner in operation.blocks:
            yield from _types(inner)


def run(given: Given, name: str) -> str:
    """Compile and run a program: what is wrong with its results, "" if nothing.

    Raises:
      TpuflowError: it cannot be compiled.
    """
    program = compile_stablehlo(lower_stablehlo(given.module, name, complex_ports=True))
    outputs, _ = Executable(program).launch([_ported(x) for x in given.arguments])
    pairs = zip(given.checks, outputs, strict=True)
    return "; ".join(filter(None, (mismatch(c.how, _unported(np.asarray(got), c.expected), c.expected) for c, got in pairs)))


def _ported(x: np.ndarray) -> np.ndarray:
    return np.stack((np.real(x), np.imag(x))) if np.iscomplexobj(x) else x


def _unported(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return x[0] + np.complex64(1j) * x[1] if np.iscomplexobj(like) else x


def mismatch(how: str, got: np.ndarray, expected: np.ndarray) -> str:
    """How numbers differ from those that a check expects; "" if they are as close as it asks for.

    Raises:
      ValueError: the check is not known.
    """
    if how not in _CHECKS:
        raise ValueError(f"check.{how}; known are {', '.join(_CHECKS)}")
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype}{got.shape} where {expected.dtype}{expected.shape} is expected"
    if np.iscomplexobj(got):
        return mismatch(how, np.real(got), np.real(expected)) or mismatch(how, np.imag(got), np.imag(expected))
    with np.errstate(all="ignore"):
        bad = ~(_CHECKS[how](got, expected) | (got == expected) | ((got != got) & (expected != expected)))
    if not bad.any():
        return ""
    return f"not equal ({how}) in {bad.sum()} of {bad.size} places: {got[bad][0]} where {expected[bad][0]} is expected"


def _is_near(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    largest = np.max(np.abs(np.where(np.isfinite(expected), expected, 0)), initial=0)
    return _distance(got, expected) <= np.maximum(ULPS * _ulp(expected), _ulp(largest.astype(expected.dtype)))


def _distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.abs(got.astype(np.float64) - expected.astype(np.float64))


def _ulp(x: np.ndarray) -> np.ndarray:
    """The distance to the next larger number of x's type, as f64."""
    limits = jnp.finfo(x.dtype)
    exponent = np.frexp(np.maximum(np.abs(x.astype(np.float64)), float(limits.smallest_normal)))[1]
    return np.ldexp(float(limits.eps), exponent - 1)


_CHECKS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "expect_eq": lambda got, expected: False,
    "expect_almost_eq": lambda got, expected: _is_near(got, expected) | (_distance(got, expected) <= ALMOST),
    "expect_close": _is_near,
}
"""Where numbers that are neither equal nor both NaN are close enough."""


def judged(name: str, text: str) -> Case:
    """What became of a program."""
    for pattern, why in LEFT_OUT:
        if pattern.search(text):
            return Case(name, "skipped", text=why)
    try:
        given = read(text)
        if lacks := lacking(given):
            return Case(name, "skipped", text=lacks)
        wrong = run(given, name)
    except Exception as error:  # of any kind: each is a row of the page, by its class
        failed = Case(name, "failed", kind=type(error).__name__, text=str(error))
        return replace(failed, cause=cause_of(failed, set()))
    failed = Case(name, "failed", kind="AssertionError", text=wrong)
    return replace(failed, cause=cause_of(failed, set())) if wrong else Case(name, "passed")


def cases_of(checkout: Path, folder: str, sample: int, seed: int, only: str = "") -> Iterator[Case]:
    """The programs of a folder whose names begin so, or as many of them, drawn from a seed."""
    found = [p for file in sorted((checkout / folder).glob("*.mlir")) for p in programs(file) if p[0].startswith(only)]
    chosen = sorted(random.Random(seed).sample(found, sample)) if 0 < sample < len(found) else found
    for number, (name, text) in enumerate(chosen):
        yield judged(name, text)
        if number % FRESH_AFTER == FRESH_AFTER - 1:
            jax.clear_caches()
            gc.collect()


def page(found: dict[str, list[Case]], sample: int, seed: int) -> str:
    """The section of docs/conformance.md."""
    how = f"{sample} programs of each folder, drawn with seed {seed}" if sample else "every program"
    lines = [
        "Programs with inputs and expected results, of StableHLO's repository, on the fast engine. Written by",
        f"`make conformance STABLEHLO=path` for a checkout of StableHLO: {how}.",
        f"Results that are to be equal are; close ones within {ULPS} units in the last place, or one of the largest's.",
        "Subnormal numbers of f32 and bf16 are zeros on the device, as on TPUs and under XLA:CPU ([numerics](numerics.md)), so `ceil` and",
        "`floor` of them are zeros where StableHLO's interpreter has 1 and -1. The transform of 7,680 elements at a time",
        "(`fft_complex64_14_15_16_17`) is as near to one in f64 as what is expected of it: 5.9e-9 and 6.0e-9, root mean square.",
        "Not counted are programs of types which the device lacks, those only for StableHLO's interpreter, and those that expect nothing.",
        "",
        "| folder | cases | passed | failed | not counted | pass rate |",
        "|---|---|---|---|---|---|",
        *(row(folder, cases) for folder, cases in found.items()),
        row("all", [case for cases in found.values() for case in cases]),
        "",
        "| why | cases | one of them |",
        "|---|---|---|",
        *causes(
            [case for cases in found.values() for case in cases],
            "types that the device lacks, operations of the interpreter's, nothing expected",
        ),
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.stablehlo_data", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of StableHLO")
    parser.add_argument("--sample", type=int, default=0, help="programs of each folder [every one]")
    parser.add_argument("--seed", type=int, default=0, help="of the sample [%(default)s]")
    parser.add_argument("--only", default="", help="programs whose names begin so")
    parser.add_argument("--json", type=Path, help="every case, as JSON")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/conformance.md"), help="[%(default)s]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs and write the section; 0 if all that counts passed, 1 if not, 2 if there is no such checkout."""
    given = _parser().parse_args(argv)
    missing = [folder for folder in FOLDERS if not (given.checkout / folder).is_dir()]
    if missing:
        print(f"{given.checkout}: no folder {missing[0]}; expected a checkout of StableHLO's repository.", file=sys.stderr)
        return 2
    found: dict[str, list[Case]] = {}
    for folder in FOLDERS:
        found[folder] = list(cases_of(given.checkout, folder, given.sample, given.seed, given.only))
        print(row(folder, found[folder]), flush=True)
    put_section(given.output, TITLE, page(found, given.sample, given.seed))
    if given.json:
        given.json.write_text(json.dumps({f: [asdict(c) for c in cases] for f, cases in found.items()}, indent=1), encoding="utf-8")
    return 0 if all(c.outcome == "passed" for cases in found.values() for c in cases if counted(c)) else 1


if __name__ == "__main__":
    sys.exit(main())
