"""docs/extending.md: its diffs apply to the library as it is, and its lines run on what they make of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "extending.md"
_BLOCK = re.compile(r"```(diff|python)\n(.*?)```", re.DOTALL)


def blocks(kind: str) -> list[str]:
    """The page's diffs, or its lines of Python."""
    return [text for found, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")) if found == kind]


def apply(diff: str, tree: Path) -> None:
    """Change a file, or make one, as a diff says; each hunk's lines before the change stand in the file once."""
    head, *lines = diff.splitlines(keepends=True)
    path = tree / head.removeprefix("--- ").strip()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for hunk in "".join(lines).split("@@\n"):
        old, new = ("".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in (" ", sign)) for sign in "-+")
        assert text.count(old) == 1 or not text, f"{path.name} has {text.count(old)} times:\n{old}"
        text = text.replace(old, new, 1)
    path.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_every_change_on_the_page_works(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "tpuflow", tmp_path / "tpuflow", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in blocks("diff"):
        apply(diff, tmp_path)
    (tmp_path / "page.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tpu-mine" in done.stdout and "Classifier trained in fp16_static" in done.stdout
