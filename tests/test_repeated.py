"""Layers that come again are emitted and timed once, and get what they would get by themselves, names and source lines included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpuflow
from models.gpt2 import GPT2, TINY
from models.resnet import MINDSPORE, Bottleneck, ResNet
from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.device.timing import time_program
from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.program import time_kernel
from tpuflow.isa.kernel_forms import KernelForm
from tpuflow.isa.liveness import Timeline
from tpuflow.isa.program import Program
from tpuflow.lower.emit import Repeated, emit_node
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.stays import Bus

LAYERS = 4
CHIP = get_chip("tpu-v3")


def _gradients(model: Any, x: jax.ShapeDtypeStruct) -> Graph:
    """The final graph of a model's gradients."""
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    graph = lower_jaxpr(jax.make_jaxpr(jax.grad(lambda p, v: jnp.sum(jnp.sin(model.apply(p, v)))))(params, x), "gradients")
    for step in PIPELINE:
        graph = step(graph)
    return graph


def transformer() -> Graph:
    """Equal layers, written out."""
    return _gradients(GPT2(dataclasses.replace(TINY, n_layer=LAYERS)), jax.ShapeDtypeStruct((2, 16), jnp.int32))


def residual() -> Graph:
    """Blocks of which some are equal, with pads and windows."""
    return _gradients(ResNet(Bottleneck, (2, 3, 1, 1), 5, MINDSPORE, width=8), jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32))


@pytest.mark.parametrize("make", [transformer, residual])
def test_a_layer_that_comes_again_gets_the_kernels_it_would_get_by_itself(make: Callable[[], Graph]):
    graph = make()
    plan = plan_memory(graph, CHIP)
    nodes = [n for n in graph.nodes if n.op == "fused"]
    repeated = Repeated()
    for node in nodes:
        alone, again = (emit_node(node, plan.buffer_of.__getitem__, plan.buffers, CHIP, repeated=r) for r in (None, repeated))
        assert again == alone and again.tilings == alone.tilings
        assert [(k.name, k.sources) for k in again.kernels] == [(k.name, k.sources) for k in alone.kernels]
    assert len(repeated.made) < len(nodes), "nothing came again"


@pytest.mark.slow
def test_depth_hardly_adds_forms():
    def forms(layers: int) -> tuple[int, int]:
        graph = _gradients(GPT2(dataclasses.replace(TINY, n_layer=layers)), jax.ShapeDtypeStruct((2, 16), jnp.int32))
        plan, repeated = plan_memory(graph, CHIP), Repeated()
        nodes = [n for n in graph.nodes if n.op == "fused"]
        for node in nodes:
            emit_node(node, plan.buffer_of.__getitem__, plan.buffers, CHIP, repeated=repeated)
        return len(nodes), len(repeated.made)

    (few, few_forms), (many, many_forms) = forms(LAYERS), forms(3 * LAYERS)
    assert many_forms - few_forms < (many - few) / 20, "where layers meet, nodes may be grouped in other ways"


@pytest.mark.slow
@pytest.mark.parametrize("make", [transformer, residual])
def test_a_kernel_that_comes_again_takes_the_time_it_would_take_by_itself(make: Callable[[], Graph]):
    program = compile_graph(make(), chip=CHIP)
    assert [row.time for row in time_program(program).kernels] == [
        time_kernel(k, Machine.of(CHIP), resident=program.resident) for k in program.kernels()
    ]


@pytest.mark.parametrize("chip", ["tpu-v4", "tpu-v5e"])
def test_a_kernel_that_comes_again_needs_of_the_memory_bus_what_it_would_need_by_itself(chip: str, monkeypatch: pytest.MonkeyPatch):
    program = compile_graph(transformer(), chip=chip)
    timeline = Timeline(program)
    shared = Bus.of(program, timeline)
    monkeypatch.setattr(Program, "forms_by_id", _each_its_own)
    assert shared == Bus.of(program, timeline)


def _each_its_own(program: Program) -> dict[int, KernelForm]:
    """In place of kernels' forms some that no other kernel has."""
    return {id(k): KernelForm(n, form.buffers) for n, (k, form) in enumerate(zip(program.kernels(), program.kernel_forms, strict=True))}


def test_arrays_padded_by_zeros_of_either_sign_are_not_taken_for_alike():
    def padded(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.pad(x, 0.0, [(2, 3, 0)]), jax.lax.pad(y, -0.0, [(2, 3, 0)])

    x = jnp.arange(1.0, 9.0)
    assert (
        [jnp.signbit(z).any() for z in tpuflow.jit(padded)(x, x)] == [jnp.signbit(z).any() for z in jax.jit(padded)(x, x)] == [False, True]
    )
