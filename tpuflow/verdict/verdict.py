"""`Verdict`: the result of `tpuflow.check`, printed as one page."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import Estimate
from tpuflow.lower.out_of_memory import size_text
from tpuflow.numerics.report import NumericsReport
from tpuflow.reports.files import write_text
from tpuflow.reports.page import page, text_page
from tpuflow.reports.profile import OUTSIDE, Profile
from tpuflow.verdict.options import Cost, Option, bounds, recomputing

HELP = "\nWhat would help:"
"""Separates the facts in the text of an OutOfMemoryError from its advice."""
SHOWN = 5
"""Buffers, layers and operations that are named."""
WIDTH = 140


@dataclass(frozen=True)
class Verdict:
    """What `tpuflow.check` found; `str` prints one page of it.

    `estimate`: time and memory; None if the step does not fit, and `error` says by how much and what takes most. `numerics`: what happened
    to its numbers; None if they were not looked at, for the reason in `unchecked`. `options`: what was estimated otherwise, with its
    figures, whether it helps or not.
    """

    name: str
    chip: str
    policy: str
    estimate: Estimate | None
    error: OutOfMemoryError | None
    numerics: NumericsReport | None
    unchecked: str
    options: tuple[Option, ...]

    @property
    def fits(self) -> bool:
        """Whether the chip's memories hold it."""
        return self.estimate is not None

    @property
    def overflows(self) -> bool | None:
        """Whether infinities or NaNs come of finite numbers; steps that a loss scale skipped until it found its place do not count.

        None if the numbers were not looked at.
        """
        report = self.numerics
        if report is None:
            return None
        settled = any(report.skipped) and not report.skipped[-1]  # a step that is not skipped had finite gradients
        return any(o.born for o in report.operations) and not settled

    @property
    def underflows(self) -> bool | None:
        """Whether any result underflows to zero; None if the numbers were not looked at."""
        return None if self.numerics is None else bool(self.numerics.underflows)

    @property
    def ok(self) -> bool:
        """Whether it fits and, as far as data tell, does not overflow."""
        return self.fits and not self.overflows

    @property
    def cost(self) -> Cost | None:
        """Time, traffic and memory of a step; None if it does not fit."""
        return None if self.estimate is None else Cost.of(self.estimate)

    @cached_property
    def _profile(self) -> Profile | None:
        return None if self.estimate is None else self.estimate.profile()

    @property
    def advice(self) -> list[str]:
        """What would help, a line each, with its figures."""
        helpful = [option.text(self.cost) for option in self.options if option.helps(self.cost)]
        if self._profile is None:
            return [*helpful, *map(str.strip, str(self.error).partition(HELP)[2].strip().splitlines())]
        kept = recomputing(self._profile)
        return [*helpful, *([kept] if kept else [])]

    @property
    def tried(self) -> list[str]:
        """What would not help, a line each, with its figures."""
        return [option.text(self.cost) for option in self.options if not option.helps(self.cost)]

    def __str__(self) -> str:
        where = f"{self.name} on {self.chip}{f' in {self.policy}' if self.policy else ''}"
        parts = [
            f"{where}: {self._headline()}",
            _section("fits", self._memory_lines()),
            _section("numbers", self._number_lines()),
            *([_section("time", self._time_lines(self.estimate))] if self.estimate else []),
            _section("would help", self.advice or ["nothing that was tried"]),
            *([_section("would not", self.tried)] if self.tried else []),
        ]
        return "\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        found: dict[str, Any] = {
            "name": self.name,
            "chip": self.chip,
            "policy": self.policy,
            "ok": self.ok,
            "fits": self.fits,
            "why": None if self.error is None else str(self.error),
            "needed_bytes": None if self.error is None else self.error.needed_bytes,
            "overflows": self.overflows,
            "underflows": self.underflows,
            "bounds": {} if self.estimate is None else bounds(self.estimate.time),
            "advice": self.advice,
            "options": [option.as_dict(self.cost) for option in self.options],
            "estimate": None if self.estimate is None else self.estimate.as_dict(),
            "memory": None if self._profile is None else self._profile.memory.as_dict(),
            "numerics": None if self.numerics is None else self.numerics.as_dict(),
        }
        return found

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page: this text, and the report's charts and tables if the step fits.

        Raises:
          ConfigError: the file cannot be written.
        """
        if self._profile is None:
            return write_text(path, text_page(f"{self.name} on {self.chip}", str(self)))
        write_text(path, page(self._profile, () if self.numerics is None else self.numerics, str(self)))

    # ---- text

    def _headline(self) -> str:
        numbers = {None: "", True: ", overflows", False: ", does not overflow"}[self.overflows]
        if self.estimate is None:
            return f"does not fit{numbers}"
        shares = [f", {share:.0%} of it bound by {name}" for name, share in bounds(self.estimate.time).items()]
        return f"fits{numbers}, {seconds_text(self.estimate.step_seconds)} a step{''.join(shares[:1])}"

    def _memory_lines(self) -> list[str]:
        if self.estimate is None or self._profile is None:
            return f"no: {str(self.error).partition(HELP)[0]}".splitlines()
        e, m, map_ = self.estimate, self.estimate.memory, self._profile.memory
        peak, there = m.peak_memory_in_bytes, e.chip.available_hbm_bytes
        sizes = {"arguments": m.argument_size_in_bytes, "temporaries": m.temp_size_in_bytes, "constants": m.constant_size_in_bytes}
        live = ", ".join(f"{name} {size_text(size)}" for name, size in map_.peak_by_category.items())
        return [
            f"yes: {size_text(peak)} of {size_text(there)} ({peak / there:.1%}): "
            + ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size),
            f"at the peak {size_text(map_.peak_bytes)} live: {live or 'nothing'}; the largest:",
            *(a.line() for a in map_.at_peak(SHOWN)),
        ]

    def _number_lines(self) -> list[str]:
        return [self.unchecked] if self.numerics is None else self.numerics.explain()

    def _time_lines(self, e: Estimate) -> list[str]:
        assert self._profile is not None
        shares = ", ".join(f"{name} {share:.0%}" for name, share in bounds(e.time).items() if share >= 0.005)
        layers, kernels = self._profile.layers, self._profile.kernels
        if [line.layer for line in layers] == [OUTSIDE]:  # a plain function: its lines say more than its modules
            where = ", ".join(f"{k.what} at {k.source or k.place} {k.share:.0%}" for k in kernels[:SHOWN])
        else:
            where = ", ".join(f"{line.layer} {line.share:.0%}" for line in layers[:SHOWN])
        each = "one call" if not e.program.infeeds else f"{e.steps} step{'s' * (e.steps != 1)}"
        return [
            f"{seconds_text(e.step_seconds)} a step, {each} a round trip ({e.time.provenance})",
            f"bound by: {shares}; matrix utilisation {e.time.mfu:.1%}; roofline {seconds_text(e.time.roofline_seconds / e.steps)}",
            f"of the device's time: {where}",
            *e.time.narrowed,
            *(f"assumed: {text}" for text in e.time.assumed),
        ]


def _section(title: str, lines: list[str]) -> str:
    """Lines under a title at the left margin."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ", drop_whitespace=False) or [""]]
    return "\n".join(f"{title if i == 0 else '':10}  {line}".rstrip() for i, line in enumerate(wrapped))
