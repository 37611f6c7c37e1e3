"""The programs of docs/examples run as they are, in an empty folder, and print what the page says; notebooks lie there without outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "examples.md").read_text(encoding="utf-8")
LISTED = re.findall(r"literalinclude\} (examples/\w+\.py)", PAGE)


def printed_by_page(example: str) -> list[str]:
    """The lines that the page says an example prints; none where it says it in words."""
    after = PAGE.partition(example)[2].partition("\n## ")[0]
    found = re.search(r"\n```\n(.*?)\n```", after.partition("```")[2], re.S)
    return found[1].splitlines() if found else []


def test_every_example_is_on_the_page() -> None:
    assert sorted(LISTED) == sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", LISTED)
def test_an_example_prints_what_the_page_says(example: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run([sys.executable, DOCS / example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines
    assert set(printed_by_page(example)) <= set(lines)


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
