"""Figures on pages, made by this command: `python -m bench.pages` writes every block anew, `python -m bench.pages NAME ...` some.

A block stands between two comments that name it. It is what a command of tpuflow prints, or what a file of `bench/results/` says, which a
command of its own makes. A picture of a report stands beside a block: its command is run once more, and a browser shows what it wrote.
`--check` writes nothing and says which blocks are not what they would be, and which pictures are of other figures than their blocks; with
`--recorded` only pictures and the blocks that stand on files are looked at, which takes no time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import pictures, recorded

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
FIRST_EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page; `file` is the one of `bench/results/` that it stands on, none if a command is run for it."""

    page: str
    make: Callable[[], str]
    file: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """The report that a block's command writes, as a picture: its file, the command, and which lines of what it prints are the block."""

    file: str
    block: str
    command: str
    lines: slice

    def take(self) -> None:
        """Make the file anew."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.html"
            printed = command(f"{self.command} --html {report}")
            pictures.take(report, ROOT / self.file, shown(printed, self.lines))

    @property
    def stale(self) -> bool:
        """Whether it is of other figures than the block beside it."""
        return pictures.described(ROOT / self.file) != text_in((ROOT / BLOCKS[self.block].page).read_text(encoding="utf-8"), self.block)


def fenced(lines: Iterable[str]) -> str:
    """Lines as they were printed."""
    return "\n".join(["```", *lines, "```"])


def shown(text: str, *parts: slice) -> str:
    """Some lines of a text, with dots for those that are left out."""
    lines, kept, end = text.rstrip("\n").split("\n"), [], 0
    for part in parts:
        first, last, _ = part.indices(len(lines))
        kept += [*(["..."] if first > end else []), *lines[first:last]]
        end = last
    return fenced([*kept, *(["..."] if end < len(lines) else [])])


def command(arguments: str) -> str:
    """What `tpuflow` with these arguments prints, where the repository is."""
    from tpuflow.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.chdir(ROOT):
        main(arguments.split())
    return re.sub(r"^tpuflow \w+: ", "", printed.getvalue())


def _example() -> str:
    """What the README's first example prints, but for the last line, which is of the host.

    Raises:
      DataError: Fashion-MNIST cannot be had; the README does not show what the embedded images give.
    """
    from tpuflow.examples import data

    data.load("fashion-mnist", embedded=False)
    printed = io.StringIO()
    code = FIRST_EXAMPLE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert code is not None
    with contextlib.redirect_stdout(printed):
        exec(compile(code[1], "README.md", "exec"), {"__name__": "__main__"})
    return shown(printed.getvalue(), slice(0, -1))


def _lenet(*parts: slice) -> str:
    """Lines of LeNet's profile."""
    import tpuflow
    from models.lenet import lenet_step

    return shown(str(tpuflow.estimate_training(*lenet_step(32), chip="ascend910", policy="mixed").profile()), *parts)


def _difference() -> str:
    """LeNet in batches of 32 and of 256."""
    with tempfile.TemporaryDirectory() as folder:
        reports = [os.path.join(folder, f"{batch}.json") for batch in (32, 256)]
        for batch, report in zip((32, 256), reports, strict=True):
            command(f"estimate models.lenet:lenet_step --batch {batch} --chip ascend910 --json {report}")
        text = command(f"diff {' '.join(reports)}")
    layers = next(i for i, line in enumerate(text.split("\n")) if line.startswith("layer"))
    return shown(text, slice(0, 10), slice(layers - 1, layers + 4))


def _calibration() -> str:
    """What `tpuflow calibrate -o` writes: the constants of the TPUs."""
    from tpuflow.chips import get_chip
    from tpuflow.device.timing.calibration import calibration_of
    from tpuflow.estimating.commands import calibration_toml

    return f"```toml\n{calibration_toml(calibration_of(get_chip('tpu-v5e')))}```"


def _sweep(target: str, policy: str, steps: int) -> str:
    """A sink study."""
    chosen = f"--chip ascend910 --policy {policy} --sink-size 0 1 10 100 -1 --steps-per-epoch {steps}"
    return shown(command(f"estimate {target} {chosen}"), slice(None))


def _of(file: str, page: str, make: Callable[[Mapping[str, Any]], str]) -> Block:
    return Block(page, lambda: make(json.loads((RESULTS / file).read_text(encoding="utf-8"))), file)


RESNET, TRANSFORMER = "tpuflow.examples.models.resnet:resnet50_step", "tpuflow.examples.models.gpt2:transformer_1b3_scan_step"
STEP, HEAD = f"estimate {RESNET} --batch 32 --chip tpu-v3 --policy mixed_bf16", slice(0, 3)
BLOCKS: Mapping[str, Block] = {
    "example": Block("README.md", _example),
    "estimate": Block("README.md", lambda: shown(command(STEP), HEAD)),
    "fit": Block(
        "README.md",
        lambda: shown(command(f"estimate {TRANSFORMER} --batch 1 --chip tpu-v5e --policy mixed_bf16"), slice(0, 1), slice(-3, -1)),
    ),
    "check": Block("docs/check.md", lambda: shown(command(f"check {RESNET} --chip tpu-v3"), slice(None))),
    "layers": Block("docs/reports.md", lambda: _lenet(slice(0, 22), slice(38, 46))),
    "live": Block("docs/reports.md", lambda: _lenet(slice(47, 53), slice(-1, None))),
    "misfit": Block("docs/reports.md", lambda: shown(command(f"estimate {RESNET} --batch 1024 --chip tpu-v3"), slice(None))),
    "difference": Block("docs/reports.md", _difference),
    "sinks": Block("docs/reports.md", lambda: _sweep("models.lenet:lenet_step", "O0", 1875)),
    "long-step": Block("docs/reports.md", lambda: _sweep("models.resnet:resnet50_step", "O3", 40036)),
    "calibration": Block("docs/timing.md", _calibration),
    "seconds": _of("estimate.json", "docs/timing.md", recorded.seconds),
    "depth": _of("depth.json", "docs/timing.md", recorded.depth),
    "scalesim": _of("scalesim.json", "docs/timing.md", recorded.scalesim),
    "fidelity": _of("fidelity.json", "docs/numerics.md", recorded.fidelity),
    "losses": _of("parity_diffusion.json", "docs/diffusion.md", recorded.diffusion_losses),
    "speed": _of("diffusion.json", "docs/diffusion.md", recorded.speed),
    "compiling": _of("estimate.json", "docs/diffusion.md", recorded.diffusion_compiling),
    "cifar": _of("parity_cifar.json", "docs/recipes.md", recorded.classifier),
    "curves": _of("resnet50_curves.json", "docs/recipes.md", recorded.curves),
    "detection": _of("parity_yolov5.json", "docs/recipes.md", recorded.detection),
    "mesh-speed": _of("mesh_speed.json", "docs/meshes.md", recorded.mesh_speed),
    "mesh-processes": _of("mesh_processes.json", "docs/processes.md", recorded.mesh_processes),
    "gpt2": _of("parity_clm_124m.json", "docs/recipes.md", recorded.language),
    "gpt2-small": _of("parity_clm_10m.json", "docs/recipes.md", recorded.language),
}
PICTURES: Mapping[str, Picture] = {"report": Picture("docs/report.png", "estimate", STEP, HEAD)}


def pattern(name: str) -> re.Pattern[str]:
    """A block with its comments: what goes before it, itself, what goes behind it."""
    return re.compile(rf"(<!-- {name}: [^\n]*-->\n)(.*?)(\n<!-- end of {name} -->)", re.DOTALL)


def text_in(page: str, name: str) -> str:
    """What stands in a block of a page's text.

    Raises:
      ValueError: there is no such block.
    """
    found = pattern(name).search(page)
    if found is None:
        raise ValueError(f"no block <!-- {name}: python -m bench.pages {name} --> ... <!-- end of {name} --> in {BLOCKS[name].page}.")
    return found[2]


def _block(name: str, *, write: bool) -> list[str]:
    """Make a block; the line that says so if it was not that before."""
    block = BLOCKS[name]
    path = ROOT / block.page
    made, before = block.make(), path.read_text(encoding="utf-8")
    if text_in(before, name) == made:
        return []
    if write:
        path.write_text(pattern(name).sub(lambda found: found[1] + made + found[3], before), encoding="utf-8")
    return [f"{block.page}: block {name!r}"]


def _picture(name: str, *, write: bool) -> list[str]:
    """Take a picture, always, as it may look otherwise with the same figures; or the line that says that it is of other figures."""
    picture = PICTURES[name]
    if write:
        picture.take()
        return [f"{picture.file}: picture of block {picture.block!r}"]
    return [f"{picture.file}: picture of other figures than block {picture.block!r}; python -m bench.pages {name}"] if picture.stale else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if a block or picture that is checked is not what it would be."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = [*BLOCKS, *PICTURES]
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME", help="blocks and pictures; all of them if none is named")
    parser.add_argument("--check", action="store_true", help="write nothing; say which blocks are not what they would be")
    parser.add_argument("--recorded", action="store_true", help="only pictures, and blocks that stand on files of bench/results")
    given = parser.parse_args(arguments)
    found = []
    for name in given.names or known:
        if name in PICTURES:
            found += _picture(name, write=not given.check)
        elif BLOCKS[name].file or not given.recorded:
            found += _block(name, write=not given.check)
    print("\n".join([f"{len(found)} {'are not what they would be' if given.check else 'written anew'}", *found]))
    return int(given.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
