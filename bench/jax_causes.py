"""What becomes of a case of other people's tests, the class of a failure by its cause, and the tables of docs/conformance.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

CRASH, HANG, NOT_RUN = "Crash", "Hang", "NotRun"
"""Kinds of ends that are no exceptions."""


@dataclass(frozen=True, slots=True)
class Case:
    """What became of a case: passed, failed or skipped; of a failure the kind of exception and its text; its class, once it has one."""

    name: str
    outcome: str
    seconds: float = 0.0
    kind: str = ""
    text: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """A class of failures: whether it counts against the device, and what the kind and the text look like."""

    name: str
    pattern: str
    counts: bool = True

    def holds(self, case: Case) -> bool:
        """Whether a failure is of it."""
        return re.search(self.pattern, f"{case.kind}: {case.text}", re.DOTALL) is not None


ELSEWHERE = "fails on JAX's CPU backend, too"
CAUSES = (
    Cause("hangs", f"^{HANG}:"),
    Cause("ends the process", f"^{CRASH}:"),
    Cause("not run: too many cases before it crashed or hung", f"^{NOT_RUN}:"),
    Cause("64-bit types, only emulated on TPUs", r"UNIMPLEMENTED.*(64-bit (elements|integers)|complex numbers of two f64)", counts=False),
    Cause("a program for several devices", r"multi-chip programs"),
    Cause("8-bit floating types and 4-bit types", r"no such elements"),
    Cause("a dot algorithm that the matrix unit does not have", r"the algorithm #stablehlo.dot_algorithm", counts=False),
    Cause("exported for other platforms by name", r"was exported for platforms", counts=False),
    Cause("no lowering rule", r"no lowering rule"),
    Cause("a form that a rule does not cover", r"UNIMPLEMENTED|^UnsupportedPrimitiveError"),
    Cause("memory", r"RESOURCE_EXHAUSTED"),
    Cause("a defect: INTERNAL", r"INTERNAL"),
    Cause("other refusals", r"JaxRuntimeError|TpuflowError"),
    Cause("a count of compilations, cache entries or operations in a text", r"^AssertionError: \d+ != \d+"),
    Cause("wrong values", r"^AssertionError: .*(Not equal to tolerance|Mismatched elements|not equal|ot close|!= )"),
    Cause("other", ""),
)  # fmt: skip
"""The first that holds is a failure's; in this order."""


SKIPPED_ELSEWHERE = "skipped by JAX on its CPU backend, too"
SKIPPED_ON_TPU = "skipped by JAX on TPUs, too"
FAILS_SKIPPED_ON_TPU = "fails here, and JAX skips it on TPUs"
SKIPPED = "skipped"


def cause_of(case: Case, elsewhere: Collection[str] = (), on_tpu: Collection[str] = ()) -> str:
    """The name of the class of what did not pass.

    Args:
      elsewhere: the names of those that fare the same on JAX's CPU backend.
      on_tpu: the names of those that JAX skips on TPUs.
    """
    skipped = case.outcome == SKIPPED
    if case.name in elsewhere:
        return SKIPPED_ELSEWHERE if skipped else ELSEWHERE
    if case.name in on_tpu:
        return SKIPPED_ON_TPU if skipped else FAILS_SKIPPED_ON_TPU
    return SKIPPED if skipped else next(cause.name for cause in CAUSES if cause.holds(case))


def asks(case: Case) -> bool:
    """Whether a case asks something of a TPU: JAX skips it neither on its own CPU backend nor on TPUs."""
    return case.cause not in (SKIPPED_ELSEWHERE, SKIPPED_ON_TPU)


def counted(case: Case) -> bool:
    """Whether a case says something of the device."""
    uncounted = {ELSEWHERE, FAILS_SKIPPED_ON_TPU, *(cause.name for cause in CAUSES if not cause.counts)}
    return case.outcome != SKIPPED and case.cause not in uncounted


def row(file: str, cases: Sequence[Case]) -> str:
    """A row of the page's table: how those of a file's cases fared that ask something."""
    asked = [c for c in cases if asks(c)]
    of = [c for c in asked if counted(c)]
    passed = sum(c.outcome == "passed" for c in of)
    rate = f"{passed / len(of):.1%}" if of else ""
    return f"| {file} | {len(asked)} | {passed} | {len(of) - passed} | {len(asked) - len(of)} | {rate} |"


def causes(cases: Sequence[Case], skipped: str = SKIPPED) -> Iterator[str]:
    """A row for each cause, those that count first, the most frequent first."""
    left_out = sum(c.outcome == SKIPPED and asks(c) for c in cases)
    failed = [c for c in cases if c.outcome == "failed"]
    numbers = Counter(c.cause for c in failed)
    for cause, number in sorted(numbers.items(), key=lambda row: (not counted(Case("", "failed", cause=row[0])), -row[1])):
        example = next(c for c in failed if c.cause == cause)
        remark = "" if counted(example) else " (not counted)"
        yield f"| {cause}{remark} | {number} | `{example.name.split('::')[-1]}`: {_brief(example)} |"
    if left_out:
        yield f"| {skipped} (not counted) | {left_out} | |"


MOST_REASONS = 4


def reasons(skipped: Sequence[Case]) -> str:
    """The commonest reasons that JAX gives, as a table's cell."""
    numbers = Counter(_cell(c.text) for c in skipped).most_common()
    said = [f"{text} ({number})" for text, number in numbers[:MOST_REASONS]]
    rest = sum(number for _, number in numbers[MOST_REASONS:])
    return "; ".join([*said, *([f"other reasons ({rest})"] if rest else [])])


def _brief(case: Case) -> str:
    """What a failure said, as a table's cell."""
    return f"{case.kind}: {_cell(case.text)}"


def _cell(text: str) -> str:
    short = re.sub(r"\S*/(?=[^/\s]+\.py\b)", "", " ".join(text.split()))[:160]
    return short.replace("|", "\\|").replace("<", "\\<").replace("`", "'")
