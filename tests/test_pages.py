"""Figures on pages are what their commands make of what was recorded, and commands can be run again; what estimates take of the host."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from bench import estimate, pages

MARK = re.compile(r"<!-- ([\w-]+): python -m bench\.pages ([\w-]+) -->")
NUMBER = re.compile(r"[\d.,]+")
WITHOUT_ARRAYS = ("check", "difference", "estimate", "fit", "layers", "live", "long-step", "misfit", "sinks")
"""Blocks of what is modelled; `example` trains."""


def test_every_block_of_a_page_has_a_row_and_every_row_a_block() -> None:
    found = [
        (name, str(path.relative_to(pages.ROOT)))
        for path in (pages.ROOT / "README.md", *sorted((pages.ROOT / "docs").glob("*.md")))
        for name, again in MARK.findall(path.read_text(encoding="utf-8"))
        if name == again
    ]
    assert sorted(found) == sorted((name, block.page) for name, block in pages.BLOCKS.items())


def test_pages_say_what_was_recorded() -> None:
    assert pages.main(["--check", "--recorded"]) == 0


def test_a_block_that_says_something_else_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(pages.BLOCKS, "depth", pages.Block("docs/timing.md", lambda: "otherwise", "depth.json"))
    assert pages.main(["--check", "depth"]) == 1
    assert "docs/timing.md: block 'depth'" in capsys.readouterr().out


def test_a_picture_of_other_figures_than_its_block_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(pages.PICTURES, "report", replace(pages.PICTURES["report"], block="fit"))
    assert pages.main(["--check", "report"]) == 1
    assert "docs/report.png: picture of other figures than block 'fit'" in capsys.readouterr().out


def test_every_picture_is_on_the_page_of_its_block() -> None:
    for picture in pages.PICTURES.values():
        assert f"]({picture.file})" in (pages.ROOT / pages.BLOCKS[picture.block].page).read_text(encoding="utf-8")


def test_lines_that_are_left_out_leave_dots() -> None:
    text = "\n".join("abcdef")
    assert pages.shown(text, slice(0, 1), slice(3, 5)) == "```\na\n...\nd\ne\n...\n```"
    assert pages.shown(text, slice(None)) == "```\na\nb\nc\nd\ne\nf\n```"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_ARRAYS)
def test_commands_of_blocks_run_and_begin_as_on_the_page(name: str) -> None:
    """The first line but for its numbers, which a new fit or a new tiling changes: then `python -m bench.pages` is run again."""
    block = pages.BLOCKS[name]
    shown = pages.text_in((pages.ROOT / block.page).read_text(encoding="utf-8"), name)
    assert NUMBER.sub("", block.make().split("\n")[1]) == NUMBER.sub("", shown.split("\n")[1])


@pytest.mark.slow
def test_the_step_of_stable_diffusion_in_full_size_compiles_in_twelve_times_resnet_50s_time_and_six_gigabytes() -> None:
    """The larger one, with inner values computed again. As whole processes, imports and timing with them, in seconds of processors.
    ResNet-50's takes four or five where this takes half a minute; there are machines on which both take more than twice as long."""
    larger = next(t for t in estimate.TARGETS if t.target.endswith("diffusion_checkpointed_step"))
    resnet, cost = (estimate.cost_of([sys.executable, "-m", "tpuflow", "estimate", *t.options]) for t in (estimate.TARGETS[0], larger))
    assert cost.cpu_seconds < 12 * resnet.cpu_seconds
    assert cost.peak_bytes < 6e9
