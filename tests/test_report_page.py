"""The report page in a browser: drawn without a complaint, and seen in a screenshot. Its script is checked by Node.js where there is one.

Both need programs that no Python package brings (Debian: chromium, nodejs); without them these tests are reported as skipped, by name.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import optax
import pytest

import tpuflow
from bench.pictures import BROWSER, BROWSERS, browse
from models.lenet import lenet_step
from tests.test_comparing import TEXT
from tpuflow.comparing import comparing, vendor
from tpuflow.comparing.hlo import parse
from tpuflow.comparing.trips import with_trips

NODE = shutil.which("node")
SCRIPT = Path(tpuflow.__file__).parent / "reports" / "page.js"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)}")
TALL = "--window-size=1280,3600"
SECTIONS = ("timeline", "layers", "queues", "roofline", "memory", "kernels", "numerics")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of LeNet's training step, with what fp16 does to the numbers of a small one."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    found = tpuflow.estimate_training(*lenet_step(32), chip="ascend910", policy="mixed", optimizer=optax.adam(1e-3))
    batch = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    numerics = tpuflow.check_numerics(nn.Dense(1), batch, policy="fp16", optimizer=optax.sgd(1e-9))
    assert "100% of the parameter updates round to nothing" in str(numerics)
    found.html(path, numerics=numerics)
    return path


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_is_javascript(tmp_path: Path):
    assert subprocess.run([str(NODE), "--check", SCRIPT], capture_output=True).returncode == 0
    broken = tmp_path / "broken.js"
    broken.write_text(SCRIPT.read_text().replace("function queues() {", "function queues( {"))
    assert subprocess.run([str(NODE), "--check", broken], capture_output=True).returncode != 0


@needs_browser
def test_every_section_is_drawn_and_the_console_is_silent(page: Path):
    done = browse(page, "--dump-dom", TALL)
    assert "CONSOLE" not in done.stderr
    assert 'data-drawn="yes"' in done.stdout, "the script ran to its end"
    parts = re.split(r'<section id="(\w+)"', done.stdout)
    drawn = dict(zip(parts[1::2], parts[2::2], strict=True))
    for name in ("timeline", "queues", "roofline", "memory"):
        assert drawn[name].count("<rect") + drawn[name].count("<circle") >= 5, name
    assert drawn["kernels"].count("<tr>") > 20 and drawn["numerics"].count("<tr>") > 5
    assert "100% of the parameter updates round to nothing" in drawn["numerics"]
    assert 'data-path="LeNet5/conv2"' in drawn["layers"] and "NaN" not in done.stdout and "Infinity" not in done.stdout


@needs_browser
def test_a_broken_page_would_be_noticed(page: Path, tmp_path: Path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("const t = data.timeline", "const t = data.nothing"))
    done = browse(broken, "--dump-dom", TALL)
    assert "CONSOLE" in done.stderr and 'data-drawn="yes"' not in done.stdout


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("scheme", "paper", "colors"),
    [("1", "#ffffff", ("#4477aa", "#ee6677", "#228833", "#66ccee")), ("0", "#1b2130", ("#6ea3d8", "#f28b97", "#4db35f", "#66ccee"))],
    ids=["light", "dark"],
)
def test_a_screenshot_shows_bars_in_every_color_of_the_browsers_scheme(page: Path, scheme: str, paper: str, colors: tuple[str, ...]):
    """Colors of the phases and of the memory's categories cover a visible part of the picture, the paper most of it."""
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    picture = page.parent / f"page{scheme}.png"
    browse(page, TALL, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
    pixels = np.asarray(image.open(picture).convert("RGB")).reshape(-1, 3).astype(int)
    covered = {color: (np.abs(pixels - list(bytes.fromhex(color[1:]))).max(1) <= 2).sum() for color in (paper, *colors)}
    assert min(covered.values()) > 2000, covered
    assert covered[paper] > len(pixels) / 3


def asked(page: Path, width: int, script: str) -> dict[str, Any]:
    """What a script finds in the page, shown in a frame of so many pixels; it fills the object `answer`."""
    frame = page.with_name(f"frame{width}.html")
    inside = html.escape(page.read_text())
    frame.write_text(f'''<body style="margin: 0"><iframe style="border: 0; width: {width}px; height: 4000px" srcdoc="{inside}"></iframe>
<script>document.querySelector("iframe").onload = (event) => {{
  const page = event.target.contentDocument, answer = {{}};
  {script}
  document.body.innerHTML = "<pre>" + JSON.stringify(answer) + "</pre>";
}};</script>''')
    done = browse(frame, "--dump-dom", f"--window-size={max(width, 600)},4000")
    assert "CONSOLE" not in done.stderr
    return json.loads(html.unescape(done.stdout.partition("<pre>")[2].partition("</pre>")[0]))


OUTSIDE = """
  const within = (e) => e.closest(".table, pre, details");
  const edge = page.documentElement.clientWidth + 1, parts = [...page.querySelectorAll("main *, header *")].filter((e) => !within(e));
  answer.outside = parts.filter((e) => e.getBoundingClientRect().right > edge).map((e) => e.outerHTML.slice(0, 90));
  answer.wide = page.documentElement.scrollWidth;
  answer.source = [...page.querySelectorAll("#kernels th")].find((e) => e.textContent === "source").getBoundingClientRect().right;
"""


@pytest.mark.slow
@needs_browser
def test_nothing_is_cut_off_and_the_source_is_in_sight(page: Path):
    desk, phone = asked(page, 1280, OUTSIDE), asked(page, 390, OUTSIDE)
    assert desk["outside"] == phone["outside"] == []
    assert (desk["wide"], phone["wide"]) == (1280, 390)
    assert desk["source"] < 1280


@pytest.mark.slow
@needs_browser
def test_nothing_of_a_page_of_differences_is_cut_off(page: Path):
    steps = [tpuflow.estimate_training(*lenet_step(batch), chip=chip) for batch, chip in ((32, "ascend910"), (64, "tpu-v3"))]
    other = page.with_name("differences.html")
    tpuflow.diff(*steps).html(other)
    wide = """
  const inside = (e) => e.getBoundingClientRect().right <= page.documentElement.clientWidth;
  answer.outside = [...page.querySelectorAll("main *")].filter((e) => !inside(e)).map((e) => e.outerHTML.slice(0, 90));
  answer.rows = page.querySelectorAll("#where tr").length;
  answer.torn = page.querySelector("#where").textContent.includes("->");
"""
    for width in (1280, 390):
        found = asked(other, width, wide)
        assert found["outside"] == [] and found["rows"] > 10 and not found["torn"]


@pytest.mark.slow
@needs_browser
def test_nothing_of_a_page_of_a_comparison_is_cut_off(page: Path):
    module = with_trips(parse(TEXT))
    theirs = vendor.Compiled(module, argument_bytes=10**9, temp_bytes=10**9, topology=vendor.Topology("v3:2x2", 2))
    other = page.with_name("comparison.html")
    comparing.compared(tpuflow.estimate_training(*lenet_step(32), chip="tpu-v3"), theirs).html(other)
    wide = """
  const inside = (e) => e.getBoundingClientRect().right <= page.documentElement.clientWidth;
  answer.outside = [...page.querySelectorAll("main *")].filter((e) => !inside(e)).map((e) => e.outerHTML.slice(0, 90));
  answer.rows = page.querySelectorAll("#layers tr").length;
  answer.explained = page.querySelectorAll("#explained h3").length;
"""
    for width in (1280, 390):
        found = asked(other, width, wide)
        assert found["outside"] == [] and found["rows"] > 10 and found["explained"] == 3


@needs_browser
def test_layers_fold_and_a_search_leaves_out_the_rest(page: Path):
    found = asked(page, 1280, """
  const rows = () => [...page.querySelectorAll("#layers td.name")].map((e) => e.title);
  const seek = (word) => { const field = page.querySelector("#search"); field.value = word; field.dispatchEvent(new Event("input")); };
  answer.all = rows();
  page.querySelector('[data-path="LeNet5"]').click();
  answer.folded = rows();
  seek("Conv2");
  answer.sought = rows();
  answer.kernels = [...page.querySelectorAll("#kernels tbody tr")].map((e) => e.textContent);
  seek("");
  answer.again = rows();
""")  # fmt: skip
    assert {"LeNet5", "LeNet5/conv2", "optimizer", "loss"} <= set(found["all"])
    assert set(found["folded"]) == {"LeNet5", "optimizer", "loss"} == set(found["again"])
    assert found["sought"] == ["LeNet5", "LeNet5/conv2"]
    assert len(found["kernels"]) == 3 and all("LeNet5/conv2" in text for text in found["kernels"])
