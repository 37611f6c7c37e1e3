"""The report page in a browser: drawn without a complaint, and seen in a screenshot. Its script is checked by Node.js where there is one.

Both need programs that no Python package brings (Debian: chromium, nodejs); without them these tests are reported as skipped, by name.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import optax
import pytest

import tpuflow
from models.lenet import lenet_step

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NODE = shutil.which("node")
SCRIPT = Path(tpuflow.__file__).parent / "reports" / "page.js"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)}")
SECTIONS = ("timeline", "layers", "queues", "roofline", "memory", "kernels", "numerics")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of LeNet's training step."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    found = tpuflow.estimate_training(*lenet_step(32), chip="ascend910", policy="mixed", optimizer=optax.adam(1e-3))
    found.html(path, numerics=[{"layer": "LeNet5/fc1", "overflow": 0.25}])
    return path


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in the browser, without a window and a profile of its own, long enough for its script to end."""
    always = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
    )
    folder = f"--user-data-dir={page.parent / 'profile'}"
    command = [str(BROWSER), *always, folder, "--window-size=1280,3600", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_is_javascript(tmp_path: Path):
    assert subprocess.run([str(NODE), "--check", SCRIPT], capture_output=True).returncode == 0
    broken = tmp_path / "broken.js"
    broken.write_text(SCRIPT.read_text().replace("function timeline() {", "function timeline( {"))
    assert subprocess.run([str(NODE), "--check", broken], capture_output=True).returncode != 0


@needs_browser
def test_every_section_is_drawn_and_the_console_is_silent(page: Path):
    done = browse(page, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert 'data-drawn="yes"' in done.stdout, "the script ran to its end"
    parts = re.split(r'<section id="(\w+)"', done.stdout)
    drawn = dict(zip(parts[1::2], parts[2::2], strict=True))
    for name in SECTIONS[:5]:
        assert drawn[name].count("<rect") + drawn[name].count("<circle") >= 5, name
    assert drawn["kernels"].count("<tr>") > 20 and drawn["numerics"].count("<tr>") == 2
    assert "LeNet5/conv2" in drawn["layers"] and "NaN" not in done.stdout


@needs_browser
def test_a_broken_page_would_be_noticed(page: Path, tmp_path: Path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        page.read_text().replace("const t = data.timeline", "const t = data.nothing").replace("t = data.timeline", "t = data.nothing")
    )
    done = browse(broken, "--dump-dom")
    assert "CONSOLE" in done.stderr and 'data-drawn="yes"' not in done.stdout


@needs_browser
def test_a_screenshot_shows_bars_in_every_color(page: Path):
    """Colors of the phases and of the memory's categories cover a visible part of the picture."""
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    picture = page.parent / "page.png"
    browse(page, f"--screenshot={picture}")
    pixels = np.asarray(image.open(picture).convert("RGB")).reshape(-1, 3)
    for color in ((0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77), (0x22, 0x88, 0x33), (0x66, 0xCC, 0xEE)):
        assert (np.abs(pixels.astype(int) - color).max(1) <= 2).sum() > 2000, color
