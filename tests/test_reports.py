"""Reports: memory over time, profiles, traces and pages, all found in the Program and its modelled time."""

from __future__ import annotations

import functools
import html.parser
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import tpuflow
from models.lenet import lenet_step
from tpuflow.device.timing.record import record
from tpuflow.estimating.estimating import Estimate
from tpuflow.isa.program import Kernel, walk
from tpuflow.reports.layers import BACKWARD, FORWARD, UPDATE, Layer, layer_of
from tpuflow.reports.trace import trace

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


def test_layers_kernels_and_queues_add_up_to_the_device_time():
    found = lenet().profile()
    for lines in (found.kernels, [line.total_seconds for line in found.layers]):
        total = sum(getattr(line, "seconds", line) for line in lines)
        assert total == pytest.approx(found.time.device_seconds, rel=1e-9)
    assert sum(k.share for k in found.kernels) == pytest.approx(1)
    assert {q.queue: q.seconds for q in found.queues} == found.time.busy_seconds
    assert {line.layer for line in found.layers} == LENET_LAYERS | {"loss", "optimizer"}


def test_every_layer_goes_forward_and_backward_and_only_the_optimizer_updates():
    by_layer = {line.layer: line for line in lenet().profile().layers}
    for name in LENET_LAYERS:
        assert set(by_layer[name].seconds) == {FORWARD, BACKWARD}
    assert set(by_layer["optimizer"].seconds) == {UPDATE}
    macs = 100 * 32 * 120 * 400
    assert by_layer["LeNet5/fc1"].macs == 3 * macs, "a dense layer: one product forward, two backward"


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


# --- trace --------------------------------------------------------------------------------------------------------------


def complete(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in found["traceEvents"] if e["ph"] == "X"]


@pytest.mark.parametrize("sink_size", [1, 100])
def test_a_trace_is_as_long_as_the_modelled_time(sink_size: int):
    found = lenet(sink_size)
    events = complete(trace(found.profile(), round_trips=1))
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.time.seconds * 1e6, rel=1e-9)


def test_nothing_on_a_thread_overlaps():
    threads: dict[Any, list[tuple[float, float]]] = {}
    for e in complete(trace(lenet().profile())):
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(threads) >= 7
    for spans in threads.values():
        spans.sort()
        assert all(a_end <= b + 1e-6 for (_, a_end), (b, _) in itertools.pairwise(spans))


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
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.script = named.get("id") or "code" if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.script = ""

    def handle_data(self, data: str) -> None:
        if self.script:
            self.scripts[self.script] = self.scripts.get(self.script, "") + data


def test_a_page_is_one_well_formed_file_that_fetches_nothing(tmp_path: Path):
    lenet().html(tmp_path / "report.html", numerics=[{"layer": "</script><b>fc1", "overflow": 0.25}])
    text = (tmp_path / "report.html").read_text()
    outline = _Outline()
    outline.feed(text)
    assert outline.open == [] and outline.fetched == []
    assert {"timeline", "layers", "queues", "roofline", "memory", "kernels", "numerics"} <= outline.ids
    assert "http" not in text.replace("http-equiv", "")
    data = json.loads(outline.scripts["data"])
    assert len(data["timeline"]["start"]) == len(lenet().time.kernels)
    assert data["numerics"] == [{"layer": "</script><b>fc1", "overflow": 0.25}]
    assert sum(data["timeline"]["duration"]) == pytest.approx(lenet().time.device_seconds / 100, rel=1e-4)
    assert len(text) < 300_000
