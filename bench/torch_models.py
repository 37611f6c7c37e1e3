"""PyTorch models that are not ours through `torch.compile(model, backend="tpuflow")`: `python -m bench.torch_models [--only NAME ...]`.

Each takes three SGD steps in eager PyTorch and on the simulated device, from the same parameters and batches (dropout and stochastic depth
at 0, since their random bits differ), in a process of its own. With `--write` their rows in docs/torch.md are written anew.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.torch_zoo import ZOO, Entry
from tpuflow.errors import one_line
from tpuflow.torch import GraphBreakWarning

STEPS = 3
CLOSE, TIMES = 1e-5, 4
"""Each step's loss may differ from eager PyTorch's by so much, relative; or by so many times what that differs from its own in fp64."""
PAGE = Path(__file__).parents[1] / "docs" / "torch.md"
BEGIN, END = "<!-- models: python -m bench.torch_models --write -->", "<!-- end of models -->"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one model: losses of eager PyTorch and the device, seconds of the first step and a later one, why it failed."""

    package: str
    name: str
    parameters: int = 0
    double: tuple[float, ...] = ()
    eager: tuple[float, ...] = ()
    device: tuple[float, ...] = ()
    parameters_off: float = math.nan
    first_seconds: float = 0.0
    step_seconds: float = 0.0
    breaks: tuple[str, ...] = ()
    failure: str = ""

    @property
    def off(self) -> float:
        """The largest relative difference of a loss of the device and eager PyTorch."""
        return _largest(self.eager, self.device)

    @property
    def eager_off(self) -> float:
        """The same of eager PyTorch in fp32 and in fp64."""
        return _largest(self.eager, self.double)

    @property
    def bound(self) -> float:
        """How far a loss may be off."""
        return max(CLOSE, TIMES * self.eager_off)

    @property
    def good(self) -> bool:
        """Whether all steps ran and every loss is within the bound."""
        return not self.failure and len(self.device) == STEPS and self.off <= self.bound

    def row(self) -> str:
        """Its row of the page's table."""
        close = "yes" if self.off <= CLOSE else "as near as fp32 decides"
        said = self.failure or (close if self.good else "no: beyond the bound")
        off = " | ".join(f"{value:.1e}" for value in (self.off, self.eager_off, self.parameters_off))
        figures = f"{off} | {self.first_seconds:.1f} s | {1e3 * self.step_seconds:.0f} ms"
        figures = figures if self.device else " | | | | "
        return f"| {self.package} | {self.name} | {self.parameters:,} | {said} | {figures} | {'; '.join(self.breaks) or 'none'} |"


HEADER = (
    "| package | model | parameters | as eager PyTorch | largest difference of a loss | eager's from fp64 | of a parameter "
    "| first step | later step | breaks |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The model with every probability of dropping something at 0."""
    for module in model.modules():
        drops = any(word in type(module).__name__ for word in ("Drop", "StochasticDepth"))
        own = vars(module)
        own.update({name: 0.0 for name, value in own.items() if isinstance(value, float) and ("drop" in name or (drops and name == "p"))})
    return model


def steps(entry: Entry, model: Any, parameters: Sequence[Any], batch: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(losses, seconds) of SGD steps."""
    optimizer = torch.optim.SGD(parameters, lr=entry.rate, momentum=0.9)
    losses, seconds = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = entry.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def tried(entry: Entry) -> Outcome:
    """Eager and compiled, side by side."""
    torch.manual_seed(0)
    model = without_dropout(entry.model().train())
    batch, plain = entry.batch(), copy.deepcopy(model)
    facts: dict[str, Any] = {"package": entry.package, "name": entry.name, "parameters": sum(p.numel() for p in model.parameters())}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts["double"] = tuple(_in_double(entry, copy.deepcopy(model), batch))
        facts["eager"] = tuple(steps(entry, plain, list(plain.parameters()), batch)[0])
        try:
            losses, seconds = steps(entry, torch.compile(model, backend="tpuflow"), list(model.parameters()), batch)
        except Exception as error:  # whatever a model raises belongs in the table
            traceback.print_exc()
            return Outcome(**facts, failure=f"{type(error).__name__}: {one_line(error)}")
    off = max(_difference(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    breaks = tuple(dict.fromkeys(_short(str(w.message)) for w in caught if w.category is GraphBreakWarning))
    return Outcome(
        **facts, device=tuple(losses), parameters_off=off, first_seconds=seconds[0], step_seconds=min(seconds[1:]), breaks=breaks
    )


def _short(text: str) -> str:
    """What a warning says of a break, without the way to the installed packages."""
    return text.split(" The model is cut")[0].rpartition("site-packages/")[2]


def _in_double(entry: Entry, model: Any, batch: dict[str, Any]) -> list[float]:
    """Losses in fp64; none where a model has its own ideas about types."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    try:
        return steps(entry, model.double(), list(model.parameters()), wide)[0]
    except RuntimeError:
        return []


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) / abs(x) for x, y in zip(a, b, strict=False)), default=0.0)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of an element."""
    return (a - b).abs().max().item() if a.numel() else 0.0


def in_a_process(entry: Entry) -> Outcome:
    """A model on its own, so that no model's caches are another's."""
    command = [sys.executable, "-m", "bench.torch_models", "--one", entry.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Outcome(entry.package, entry.name, failure=(done.stderr.strip().splitlines() or ["it ended"])[-1][:200])
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    print(done.stderr, file=sys.stderr) if facts["failure"] else None
    read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    return Outcome(**read)


def write(outcomes: Sequence[Outcome], page: Path = PAGE) -> None:
    """The table of the page with these rows; models that were not run keep theirs."""
    before, rest = page.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {line.split(" | ")[1]: line for line in old.splitlines() if line.count(" | ") > 8} | {o.name: o.row() for o in outcomes}
    table = "\n".join([BEGIN, HEADER, *(rows[entry.name] for entry in ZOO if entry.name in rows), END])
    page.write_text(before + table + after)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status is 1 if a model is not as eager PyTorch."""
    parser = argparse.ArgumentParser(prog="python -m bench.torch_models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[e.name for e in ZOO], help="these models")
    parser.add_argument("--one", choices=[e.name for e in ZOO], help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the table of docs/torch.md")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(asdict(tried(next(e for e in ZOO if e.name == options.one)))))
        return 0
    print(HEADER, flush=True)
    outcomes = []
    for entry in ZOO:
        if not options.only or entry.name in options.only:
            outcomes.append(in_a_process(entry))
            print(outcomes[-1].row(), flush=True)
            if options.write:
                write(outcomes)
    print(f"{sum(o.good for o in outcomes)} of {len(outcomes)} as eager PyTorch within {CLOSE}")
    return 0 if all(o.good for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
