"""Reports: memory over time, profiles, traces and pages, all found in the Program and its modelled time."""

from __future__ import annotations

import functools
import html.parser
import itertools
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import tpuflow
from models.lenet import lenet_step
from tpuflow.device.timing.record import record
from tpuflow.device.timing.result import seconds_text
from tpuflow.estimating.estimating import Estimate
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.program import Kernel, walk
from tpuflow.reports.layers import BACKWARD, FORWARD, PHASES, UPDATE, Layer, layer_of
from tpuflow.reports.page import facts
from tpuflow.reports.profile import profile
from tpuflow.reports.trace import CHIP, KERNELS, LAYERS, LIVE, SENT, USED, trace
from tpuflow.reports.tracks import Stretch, nested
from tpuflow.training.descriptions import describe_optimizer

LENET_LAYERS = {"LeNet5", *(f"LeNet5/{name}" for name in ("conv1", "conv2", "fc1", "fc2", "fc3"))}


@functools.cache
def lenet(sink_size: int = 100) -> Estimate:
    """LeNet's training step as `tpuflow.train` would run it."""
    return tpuflow.estimate_training(*lenet_step(32), chip="ascend910", policy="mixed", optimizer=optax.adam(1e-3), sink_size=sink_size)


# --- layers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("", Layer("", UPDATE)),
        ("jvp()", Layer("", FORWARD)),
        ("jvp(LeNet5)/LeNet5._dense/fc1", Layer("LeNet5/fc1", FORWARD)),
        ("transpose(jvp(LeNet5))/LeNet5._dense/fc1", Layer("LeNet5/fc1", BACKWARD)),
        ("jvp(Net)/while/body/vmap(block)/dense", Layer("Net/block/dense", FORWARD)),
        ("jvp(Net)/jit(relu)/block", Layer("Net/block", FORWARD)),
        ("transpose(jvp(Net))/rematted_computation/block", Layer("Net/block", BACKWARD, recomputed=True)),
    ],
)
def test_a_name_stack_tells_module_path_and_phase(scope: str, layer: Layer):
    assert layer_of(scope) == layer


# --- memory -------------------------------------------------------------------------------------------------------------


def test_buffers_that_are_live_together_have_addresses_of_their_own():
    live = lenet().profile().memory.allocations
    assert len(live) > 80
    for i, a in enumerate(live):
        for b in live[:i]:
            if a.space == b.space and a.first <= b.last and b.first <= a.last:
                assert a.address + a.bytes <= b.address or b.address + b.bytes <= a.address, (a, b)


def test_the_timeline_adds_up_and_peaks_within_the_plan():
    memory, found = lenet().profile().memory, lenet()
    assert memory.planned_bytes == found.memory.peak_memory_in_bytes
    assert 0.7 * memory.planned_bytes < memory.peak_bytes <= memory.planned_bytes
    assert sum(memory.peak_by_category.values()) == memory.peak_bytes == sum(a.bytes for a in memory.at_peak())
    assert len(memory.places) == len(memory.timeline) == len(list(walk(found.program.code)))


def test_every_byte_has_a_category():
    memory = lenet().profile().memory
    weights = sum(p.dtype.bytes * int(jnp.prod(jnp.array(p.shape))) for p in lenet().program.inputs if p.name.startswith("params/"))
    live = memory.live_bytes
    assert set(live["parameters"]) == {weights}
    assert min(live["optimizer"]) >= 2 * weights, "Adam's two moments are there all the time"
    assert max(live["infeed"]) == 32 * 32 * 32 * 4 + 32 * 4
    assert live["activations"][0] == live["activations"][-1] == 0 < max(live["activations"])
    assert live["gradients"][0] == 0 < live["gradients"][-1] < max(live["gradients"]), "the last kernel reads those of small parameters"
    assert live["activations"].index(max(live["activations"])) < live["gradients"].index(max(live["gradients"]))


def test_what_sets_the_peak_is_named_with_layer_and_line():
    largest = lenet().profile().memory.at_peak(1)[0]
    assert (largest.category, largest.type, largest.layer) == ("gradients", "f32[32,28,28,6]", "LeNet5")
    assert largest.source.startswith("lenet.py:")
    assert "lenet.py:" in str(lenet().profile().memory)


def test_on_chip_memory_is_within_the_chip():
    memory = lenet().profile().memory
    assert {k.place for k in memory.kernels} == {place for place, block in walk(lenet().program.code) if isinstance(block, Kernel)}
    assert 0 < max(k.vmem_bytes for k in memory.kernels) <= memory.chip.vmem_bytes
    assert all(k.acc_bytes <= memory.chip.acc_bytes for k in memory.kernels)


def test_a_buffer_that_a_loop_finds_stays_to_its_end():
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        z = jnp.sin(x)
        return jax.lax.fori_loop(0, 5, lambda i, c: jnp.tanh(c @ y) + z, x)

    n = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    memory = tpuflow.estimate(function, n, n).profile().memory
    sine = next(a for a in memory.allocations if a.name.endswith("sin"))
    loop_end = max(i for i, place in enumerate(memory.places) if ".body." in place)
    assert sine.last >= loop_end and sine.category == "activations"


# --- profile ------------------------------------------------------------------------------------------------------------


def test_layers_kernels_and_queues_add_up_to_the_device_time_of_a_step():
    found = lenet().profile()
    for lines in (found.kernels, [line.total_seconds for line in found.layers]):
        total = sum(getattr(line, "seconds", line) for line in lines)
        assert total == pytest.approx(found.time.device_seconds / 100, rel=1e-9)
    assert sum(k.share for k in found.kernels) == pytest.approx(1)
    assert {q.queue: q.seconds * 100 for q in found.queues} == pytest.approx(found.time.busy_seconds)
    assert {line.layer for line in found.layers} == LENET_LAYERS | {"loss", "optimizer"}


def test_every_layer_goes_forward_and_backward_and_only_the_optimizer_updates():
    by_layer = {line.layer: line for line in lenet().profile().layers}
    for name in LENET_LAYERS:
        assert set(by_layer[name].seconds) == {FORWARD, BACKWARD}
    assert set(by_layer["optimizer"].seconds) == {UPDATE}
    macs = 32 * 120 * 400
    assert by_layer["LeNet5/fc1"].macs == 3 * macs, "a dense layer: one product forward, two backward"


def test_a_sink_changes_no_figure_of_a_step_but_the_hosts_share():
    alone, sunk = lenet(1).profile(), lenet(100).profile()
    assert [(k.what, k.count, k.macs, k.seconds) for k in alone.kernels] == [(k.what, k.count, k.macs, k.seconds) for k in sunk.kernels]
    assert [q.queue for q in alone.queues] == [q.queue for q in sunk.queues] and "round trip of" not in str(alone)
    for figure in ("seconds", "share"):
        assert [getattr(q, figure) for q in alone.queues] == pytest.approx([getattr(q, figure) for q in sunk.queues], rel=1e-12)
    assert f"time of a step {seconds_text(sunk.time.seconds / 100)}" in str(sunk), "the heading has the unit of the tables"
    assert f"round trip of 100 steps: {seconds_text(sunk.time.seconds)}" in str(sunk)
    figures = [lenet(n).as_dict() for n in (1, 100)]
    for name in ("flops", "kernels", "busy_seconds", "bound_seconds"):
        assert figures[0][name] == pytest.approx(figures[1][name]), name
    assert figures[0]["host_seconds"] == pytest.approx(100 * figures[1]["host_seconds"])
    assert figures[1]["round_trip"]["seconds"] == sunk.time.seconds


def test_a_kernel_outside_the_loop_is_a_fraction_of_a_step():
    found = lenet()
    once = tpuflow.estimate(lambda x: jnp.tanh(x @ x), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    (line,) = profile(once.program, once.time, steps=50).kernels
    assert line.count == 0.02 and line.seconds == pytest.approx(once.time.device_seconds / 50)
    assert all(k.count == 1 for k in found.profile().kernels)


def test_a_report_says_what_it_is_of():
    found = lenet().profile()
    assert found.title == "LeNet5 on ascend910 in mixed"
    assert found.settings == {"policy": "mixed", "batch": "32", "optimizer": "scale_by_adam"}
    assert dict(facts(found), date="") == {
        **found.settings, "chip": "ascend910", "steps a round trip": "100", "tpuflow": tpuflow.__version__, "date": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.sgd(0.1), "stateless"),
        (optax.sgd(0.1, momentum=0.9), "trace"),
        (optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(0.1))), "scale_by_adam, scale_by_schedule"),
        (optax.masked(optax.lion(1e-3), lambda p: jax.tree.map(lambda _: True, p)), "masked, scale_by_lion"),
        (optax.partition({"a": optax.adam(1e-3), "b": optax.sgd(1e-3)}, {"w": "a", "v": "b"}), "partition, masked, scale_by_adam"),
    ],
)
def test_an_optimizer_has_the_names_of_its_parts(optimizer: optax.GradientTransformation, words: str):
    params = {"w": jnp.ones(3), "v": jnp.ones(2)}
    assert describe_optimizer(optimizer.init(params)) == words


def test_a_profile_is_text_and_json(tmp_path: Path):
    found = lenet().profile()
    text = str(found)
    assert "LeNet5/conv2" in text and "lenet.py:" in text and "modelled on ascend910" in text and "VMEM" in text
    found.to_json(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["steps"] == 100 and len(data["kernels"]) == len(found.kernels)
    assert data["memory"]["peak_bytes"] == found.memory.peak_bytes


def test_a_compiled_function_has_the_same_reports(tmp_path: Path):
    compiled = tpuflow.jit(lambda x, w: jax.nn.relu(x @ w), chip="tpu-v3").lower(jnp.ones((64, 32)), jnp.ones((32, 16))).compile()
    found = compiled.profile()
    assert found.kernels[0].phase == FORWARD and found.kernels[0].macs == 64 * 32 * 16
    assert found.memory.peak_by_category.keys() == {"arguments", "results"}
    compiled.trace(tmp_path / "step.json")
    compiled.html(tmp_path / "report.html")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"] and "drawn" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_training_reports_its_step_and_what_its_numerics_reports_say(tmp_path: Path):
    batch = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
    options = {"batch_size": 4, "epochs": 3, "sink_size": 3, "progress": False}
    result = tpuflow.train(nn.Dense(1), batch, "fp16", optax.sgd(1e-9), numerics=True, **options)
    result.html(tmp_path / "training.html")
    text = (tmp_path / "training.html").read_text()
    assert len(result.numerics) > 1 and text.count("of the parameter updates round to nothing") == len(result.numerics)
    found = result.profile()
    assert found.steps == 3 and found.title == "Dense on generic in fp16"
    assert found.settings == {"policy": "fp16", "batch": "4", "optimizer": "stateless"}
    assert tpuflow.estimate_training(nn.Dense(1), batch).profile().settings["optimizer"] == "adam(1e-3)"


# --- trace --------------------------------------------------------------------------------------------------------------


def complete(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in found["traceEvents"] if e["ph"] == "X"]


@pytest.mark.parametrize("sink_size", [1, 100])
def test_a_trace_is_as_long_as_the_modelled_time(sink_size: int):
    found = lenet(sink_size)
    events = complete(trace(found.profile(), round_trips=1))
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.time.seconds * 1e6, abs=2e-3)


def overlapping(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of events of one row that lie neither one after the other nor one within the other, in the whole nanoseconds of Perfetto."""
    rows: dict[Any, list[tuple[int, int, str]]] = {}
    for e in events:
        begin = int(e["ts"] * 1000)
        rows.setdefault((e["pid"], e["tid"]), []).append((begin, begin + int(e["dur"] * 1000), e["name"]))
    found = []
    for row in rows.values():
        around: list[tuple[int, int, str]] = []
        for event in sorted(row, key=lambda e: (e[0], -e[1])):
            while around and around[-1][1] <= event[0]:
                around.pop()
            if around and event[1] > around[-1][1]:
                found.append((around[-1][2], event[2]))
            around.append(event)
    return found


def test_events_of_a_row_are_beside_or_within_each_other():
    events = complete(trace(lenet().profile()))
    assert overlapping(events) == [] and len({(e["pid"], e["tid"]) for e in events}) >= 8
    kernel = next(e for e in events if "lenet.py" in e.get("args", {}).get("source", ""))
    late = {**kernel, "ts": kernel["ts"] + kernel["dur"] / 2}
    assert overlapping([kernel, late]) != [], "two that do overlap are found"


def test_a_trace_keeps_to_the_format_of_trace_events():
    """What chrome://tracing and Perfetto read: names of all rows, finite times, complete events and counters of numbers."""
    found = trace(lenet().profile())
    json.dumps(found, allow_nan=False)
    named = {(e["pid"], e["tid"]) for e in found["traceEvents"] if e["name"] == "thread_name"}
    processes = {e["pid"] for e in found["traceEvents"] if e["name"] == "process_name"}
    for e in found["traceEvents"]:
        assert e["ph"] in "XCM" and isinstance(e["name"], str) and e["name"] and e["pid"] in processes
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and (e["pid"], e["tid"]) in named
        if e["ph"] == "C":
            assert e["ts"] >= 0 and e["args"] and all(isinstance(v, float) and v >= 0 for v in e["args"].values())


def test_layers_are_slices_around_their_kernels():
    events = complete(trace(lenet().profile(), round_trips=1))
    layers, kernels = ([e for e in events if (e["pid"], e["tid"]) == (CHIP, row)] for row in (LAYERS, KERNELS))
    assert {e["name"] for e in layers} == {*PHASES, "loss", "optimizer", *(name.rpartition("/")[2] for name in LENET_LAYERS)}
    for kernel in (k for k in kernels if "layer" in k["args"]):
        around = [e["name"] for e in layers if e["ts"] <= kernel["ts"] and kernel["ts"] + kernel["dur"] <= e["ts"] + e["dur"] + 1e-9]
        assert around == [kernel["args"]["phase"], *kernel["args"]["layer"].split("/")]


def test_nested_slices_share_what_their_paths_begin_with():
    path = [Stretch(0, 2, ("f", "A", "x")), Stretch(2, 3, ("f", "A", "y")), Stretch(3, 4, ("b", "A")), Stretch(5, 6, ("b", "A"))]
    assert [(s.name, s.begin, s.end) for s in nested(path)] == [
        ("f", 0, 3), ("A", 0, 3), ("x", 0, 2), ("y", 2, 3), ("b", 3, 4), ("A", 3, 4), ("b", 5, 6), ("A", 5, 6),
    ]  # fmt: skip


def counted(found: dict[str, Any], name: str) -> list[tuple[float, dict[str, float]]]:
    return [(e["ts"], e["args"]) for e in found["traceEvents"] if e["ph"] == "C" and e["name"] == name]


def test_counters_follow_memory_and_utilisation():
    profile, found = lenet().profile(), trace(lenet().profile(), round_trips=1)
    live = counted(found, LIVE)
    assert max(sum(values.values()) for _, values in live) == pytest.approx(profile.memory.peak_bytes / 2**20)
    assert set(live[0][1]) == set(profile.memory.as_dict()["live_bytes"])
    used = counted(found, USED)
    assert used[-1][1] == {"matrix": 0.0, "HBM": 0.0} and max(values["HBM"] for _, values in used) <= 100
    spans = [(b - a, values["matrix"]) for (a, values), (b, _) in itertools.pairwise(used)]
    assert sum(long * share for long, share in spans) / 1e8 == pytest.approx(profile.time.mfu * profile.time.seconds, rel=1e-3)


def test_the_links_have_a_counter():
    def summed(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda part: jax.lax.psum(part, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())(x)

    mesh = jax.sharding.AbstractMesh((4,), ("i",))
    found = tpuflow.estimate(summed, jax.ShapeDtypeStruct((4096, 256), jnp.float32), chip="tpu-v5e")
    (row,) = found.time.collectives
    sent = counted(trace(found.profile(), round_trips=1), SENT)
    assert [values["sent"] for _, values in sent] == [pytest.approx(row.sent_bytes / row.sending_seconds / 1e9), 0.0]


def test_host_gaps_stand_between_launches():
    names = [e["name"] for e in complete(trace(lenet(1).profile(), round_trips=3))]
    assert names.count("idle: host gap") == 3
    assert "98 more trips" in [e["name"] for e in complete(trace(lenet(100).profile(), round_trips=1))]


def test_tiles_of_a_kernel_end_when_it_does():
    program = lenet().program
    times = {row.place: row.time for row in lenet().time.kernels}
    for place, kernel in walk(program.code):
        if isinstance(kernel, Kernel) and place in times:
            events = record(kernel, lenet().time.machine)
            assert max(e.end for e in events) <= times[place].picoseconds - times[place].floor_picoseconds
            assert all(e.begin < e.end for e in events)


def test_a_large_grid_is_a_few_events():
    n = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    found = tpuflow.estimate(lambda a: jnp.tanh(a) + 1, n, chip="tpu-v3")
    (kernel,) = found.program.kernels()
    assert kernel.grid[0].size > 400
    events = record(kernel, found.time.machine)
    assert len(events) < 300 and any(e.repeats for e in events)


# --- page ---------------------------------------------------------------------------------------------------------------


class _Outline(html.parser.HTMLParser):
    """Ids of elements, addresses that would be fetched, and the content of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.fetched: list[str] = []
        self.scripts: dict[str, str] = {}
        self.open: list[str] = []
        self.script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {named["id"] or ""} if "id" in named else set()
        self.fetched += [named[a] or "" for a in ("src", "href") if a in named]
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)
        self.script = named.get("id") or "code" if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.script = ""

    def handle_data(self, data: str) -> None:
        if self.script:
            self.scripts[self.script] = self.scripts.get(self.script, "") + data


class Numbers:
    """What a page needs of a numerics report; itself its only row."""

    settings: ClassVar = {"policy": "fp16", "step": 40, "engine": "fast"}

    @property
    def rows(self) -> list[Numbers]:
        return [self]

    def explain(self) -> list[str]:
        return ["97% of the updates round to nothing <b>"]

    def as_dict(self) -> dict[str, Any]:
        return {"layer": "</script><b>fc1", "overflow": 0.25}


def test_a_page_is_one_well_formed_file_that_fetches_nothing(tmp_path: Path):
    lenet().html(tmp_path / "report.html", numerics=(Numbers(), Numbers()))
    text = (tmp_path / "report.html").read_text()
    outline = _Outline()
    outline.feed(text)
    assert outline.open == [] and outline.fetched == []
    assert {"timeline", "layers", "search", "queues", "roofline", "memory", "kernels", "numerics"} <= outline.ids
    assert "http" not in text.replace("http-equiv", "")
    data = json.loads(outline.scripts["data"])
    assert len(data["timeline"]["start"]) == len(lenet().time.kernels)
    assert data["numerics"] == [{"policy": "fp16", "step": 40, "layer": "</script><b>fc1", "overflow": 0.25}] * 2
    assert text.count("<h3>fp16 after 40 steps</h3><ul><li>97% of the updates round to nothing &lt;b&gt;</li>") == 2
    assert sum(data["timeline"]["duration"]) == pytest.approx(lenet().time.device_seconds / 100, rel=1e-4)
    assert len(text) < 300_000


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_queues_color_is_none_of_a_phase(theme: str):
    text = (Path(tpuflow.__file__).parent / "reports" / "page.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6});", part)) for part in text.split("prefers-color-scheme: dark"))
    colors = light if theme == "light" else light | dark
    for queue, phase in itertools.product((*QUEUES, "launch"), PHASES):
        apart = sum((int(colors[queue][i : i + 2], 16) - int(colors[phase][i : i + 2], 16)) ** 2 for i in (1, 3, 5))
        assert apart > 60**2, (queue, phase)
