"""The compiler: from functions and steps to Programs that the device runs to the same values as jax.jit."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.compile_cases import CASES
from tpuflow.compiler import compile_function, compile_graph, compile_jaxpr, compile_sink
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F32
from tpuflow.errors import CompileError, ConfigError
from tpuflow.isa.file import to_bytes
from tpuflow.isa.program import Loop, Program
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Node, TensorType
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr
from tpuflow.lower.passes.base import Pass

TOLERANCE = {"float32": 2e-5, "float16": 4e-3}  # jax.jit contracts multiply-adds and sums in its own order


def assert_close(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    tolerance = TOLERANCE.get(str(want.dtype), 0)
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def run(program: Program, *arrays: Any, infeeds: Any = (), count: int | None = None) -> Any:
    return Executable(program, engine="reference").launch([np.asarray(a) for a in arrays], infeeds, count=count)


# --- functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_agree_with_jax(name: str) -> None:
    case = CASES[name]
    program = compile_jaxpr(case.jaxpr(), name=name, donated=case.donated)
    outputs, _ = run(program, *case.arguments)
    for got, want in zip(outputs, case.expected(), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("name", CASES)
def test_passes_do_not_change_what_the_device_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    optimised, _ = run(compile_jaxpr(case.jaxpr(), name=name, donated=case.donated), *case.arguments)
    monkeypatch.setattr("tpuflow.compiler.PIPELINE", ())
    plain, _ = run(compile_jaxpr(case.jaxpr(), name=name, donated=case.donated), *case.arguments)
    for got, want in zip(optimised, plain, strict=True):
        assert got.tobytes() == want.tobytes()


def test_the_signature_says_names_donation_weak_types_and_keys() -> None:
    closed = jax.make_jaxpr(lambda key, x, s: (jax.random.fold_in(key, 1), x * s, s + 1))(jax.random.key(0), np.ones(3, np.float32), 2.0)
    program = compile_jaxpr(closed, name="f", input_names=("key", "x", "s"), output_names=("k", "y", "t"), donated=(False, True, False))
    assert [(p.name, str(p.dtype), p.shape, p.donated, p.weak, p.key) for p in program.inputs] == [
        ("key", "u32", (2,), False, False, "threefry2x32"),
        ("x", "f32", (3,), True, False, ""),
        ("s", "f32", (), False, True, ""),
    ]
    assert [(p.name, p.weak, p.key) for p in program.outputs] == [("k", False, "threefry2x32"), ("y", False, ""), ("t", True, "")]
    assert program.outputs[1].buffer == program.inputs[1].buffer


def test_a_function_is_compiled_for_the_shapes_of_its_arguments() -> None:
    program = compile_function(lambda tree: tree["a"] + tree["b"].sum(), [{"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}])
    outputs, _ = run(program, np.ones(3, np.float32), np.ones((2, 2), np.float32))
    assert_close(outputs[0], np.full(3, 5, np.float32))


def test_wrong_options_are_refused() -> None:
    closed = jax.make_jaxpr(jnp.exp)(1.0)
    with pytest.raises(ConfigError, match="2 entries in donated for 1 inputs"):
        compile_jaxpr(closed, name="f", donated=(True, False))
    with pytest.raises(ConfigError, match="unknown chip 'genericc'. Did you mean 'generic'"):
        compile_jaxpr(closed, name="f", chip="genericc")


def test_a_port_carries_one_type() -> None:
    b = Builder("f", [TensorType(F32, (3,))])
    b.outfeed(0, b.inputs[0])
    b.outfeed(0, b.reduce("add", b.inputs[0], (0,)))
    with pytest.raises(CompileError, match=r"outfeed port 0 carries f32\[3\] elsewhere, here f32\[\]"):
        compile_graph(b.finish([b.inputs[0]]))


# --- the sink -----------------------------------------------------------------------------------------------------------


def counting_step(total: Any, seen: Any, scale: Any, x: Any) -> Any:
    return total + (x * scale).sum(0), seen + 1, x.max(), total.sum()


def counting_sink() -> Program:
    x = np.ones((2, 3), np.float32)
    closed = jax.make_jaxpr(counting_step)(np.zeros(3, np.float32), np.int32(0), np.float32(2), x)
    return compile_sink(
        closed, carries=2, invariants=1, name="count", carry_names=("total", "seen"), invariant_names=("scale",),
        infeed_names=("x",), outfeed_names=("largest", "before"),
    )  # fmt: skip


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_sink_runs_the_step_as_often_as_it_is_told(steps: int) -> None:
    xs = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    start = (np.zeros(3, np.float32), np.int32(4))
    outputs, figures = run(counting_sink(), np.int32(steps), *start, np.float32(2), infeeds=[xs], count=steps)
    state: Any = start
    for i in range(steps):
        *state, largest, before = counting_step(*state, np.float32(2), xs[i])
        assert_close(figures[0][i], largest)
        assert_close(figures[1][i], np.asarray(before, np.float32))
    assert_close(outputs[0], state[0])
    assert int(outputs[1]) == 4 + steps


def test_a_sink_donates_its_state_and_keeps_its_invariants() -> None:
    program = counting_sink()
    assert [(p.name, p.donated) for p in program.inputs] == [("trips", False), ("total", True), ("seen", True), ("scale", False)]
    assert [p.buffer for p in program.outputs] == [p.buffer for p in program.inputs[1:3]]
    assert [p.name for p in program.infeeds] == ["x"] and [p.name for p in program.outfeeds] == ["largest", "before"]
    (loop,) = (b for b in program.code if isinstance(b, Loop))
    assert loop.trips == program.inputs[0].buffer


def test_a_state_that_changes_its_type_is_refused() -> None:
    closed = jax.make_jaxpr(lambda s, x: (s + x).astype(jnp.float16))(np.float32(0), np.float32(1))
    with pytest.raises(CompileError, match=r"the step turns 'loss scale' from f32\[\] into f16\[\]"):
        compile_sink(closed, carries=1, carry_names=("loss scale",))


# --- a training step ----------------------------------------------------------------------------------------------------

SIZES = (784, 512, 512, 10)
OPTIMIZERS = {"sgd": optax.sgd(1e-3), "momentum": optax.sgd(1e-3, momentum=0.9), "adam": optax.adam(1e-3), "adamw": optax.adamw(1e-3)}


def mlp_step(optimizer: optax.GradientTransformation, sizes: tuple[int, ...], batch: int) -> tuple[Any, int]:
    """The jaxpr of a training step of a multi-layer perceptron, and the number of its state's leaves."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for i, (w, b) in enumerate(params):
            x = x @ w + b
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        return -(jax.nn.one_hot(y, sizes[-1]) * jax.nn.log_softmax(x)).sum(-1).mean()

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = [(jnp.zeros((m, n)), jnp.zeros(n)) for m, n in itertools.pairwise(sizes)]
    state = optimizer.init(params)
    closed = jax.make_jaxpr(step)(params, state, jnp.zeros((batch, sizes[0])), jnp.zeros(batch, jnp.int32))
    return closed, len(jax.tree.leaves((params, state)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_is_few_kernels_and_updates_every_parameter_in_place(name: str) -> None:
    closed, carries = mlp_step(OPTIMIZERS[name], SIZES, 64)
    program = compile_sink(closed, carries=carries)
    kernels = list(program.kernels())
    assert len(kernels) <= 14, [k.name for k in kernels]
    assert [p.buffer for p in program.outputs] == [p.buffer for p in program.inputs[1:]]
    assert not [k for k in kernels if k.name.startswith("copy")]


# --- determinism and what the environment shows -------------------------------------------------------------------------

SCRIPT = """
import hashlib
from tests.compile_cases import CASES
from tests.test_compiler import OPTIMIZERS, mlp_step
from tpuflow.compiler import compile_jaxpr, compile_sink
from tpuflow.isa.file import to_bytes
closed, carries = mlp_step(OPTIMIZERS["adamw"], (20, 16, 10), 8)
programs = [compile_jaxpr(c.jaxpr(), name=n, donated=c.donated) for n, c in CASES.items()] + [compile_sink(closed, carries=carries)]
print(hashlib.sha256(b"".join(map(to_bytes, programs))).hexdigest())
"""


@pytest.mark.slow
def test_programs_are_the_same_bytes_whatever_the_hash_seed() -> None:
    digests = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
        result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
        digests.add(result.stdout.strip())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (0, []),
        (1, ["kernels, "]),
        (2, ["kernels, ", " ms "]),
        (3, ["kernels, ", " ms ", "= fused{kind=dot}"]),
        (4, ["kernels, ", " ms ", "= fused{kind=dot}", "mm_accumulate"]),
        (5, ["kernels, ", " ms ", "= fused{kind=dot}", "mm_accumulate", "= broadcast{axes=(1)}"]),
    ],
)
def test_the_debug_level_says_how_much_is_printed(
    level: int, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["dense_layer"]
    silent = to_bytes(compile_jaxpr(case.jaxpr(), name=case.name))
    monkeypatch.setenv("TPUFLOW_DEBUG", str(level))
    assert to_bytes(compile_jaxpr(case.jaxpr(), name=case.name)) == silent
    printed = capsys.readouterr().err
    assert all(text in printed for text in shown) and bool(printed) == bool(shown)


def test_a_debug_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUFLOW_DEBUG", "much")
    with pytest.raises(ConfigError, match="TPUFLOW_DEBUG='much'; expected a level from 0 to 5"):
        compile_jaxpr(CASES["dense_layer"].jaxpr(), name="f")


def test_every_stage_is_written_where_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for folder in ("one", "two"):
        monkeypatch.setenv("TPUFLOW_DUMP", str(tmp_path / folder))
        compile_jaxpr(CASES["dense_layer"].jaxpr(), name="my/layer")
        files = sorted((tmp_path / folder).iterdir())
        digests.append(hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest())
    stages = (
        "00-import",
        "01-keep-on-host",
        "02-fetch-items",
        "03-simplify",
        "04-prune-carries",
        "05-simplify",
        "06-carry-converted",
        "07-convert-early",
        "08-read-chosen",
        "09-fold-moves",
        "10-widen-after-reshape",
        "11-fuse",
        "12-hoist-invariants",
        "13-schedule",
        "14-split-epilogues",
        "15-merge-kernels",
        "16-store-less",
        "17-sum-in-product",
        "18-fuse-rows",
        "19-sum-in-map",
        "20-merge-kernels",
        "21-rematerialize",
        "22-join-products",
        "23-fetch-ahead",
        "24-join-small",
        "25-split-collectives",
        "26-schedule",
        "27-prefetch-from-host",
        "28-kernels",
    )
    names = [*(f"my_layer-{stage}.graph" for stage in stages), "my_layer-29-program.tpxs"]
    assert [re.sub(r"^\d{3,}-", "", f.name) for f in files] == names
    assert digests[0] == digests[1]


# --- errors that are ours ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Breaks(Pass):
    """A pass that cannot go on at the first tanh."""

    def __call__(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            _refuse(node)
        return graph


def _refuse(node: Node) -> None:
    if node.op == "tanh":
        raise IndexError("what nobody thought of")


def _breaks(*arguments: object) -> object:
    for x in arguments:
        for node in x.nodes if isinstance(x, Graph) else [x]:
            if isinstance(node, Node):
                raise IndexError("what nobody thought of")
    raise AssertionError("no node was given")


@pytest.mark.parametrize("stage", ["breaks", "plan-memory", "assemble"])
def test_an_error_in_any_stage_says_at_which_line_of_the_user(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = lower_jaxpr(jax.make_jaxpr(lambda x: jnp.tanh(x) * 2)(np.zeros(3, np.float32)), "f")
    names = {"plan-memory": "tpuflow.compiler.plan_memory", "assemble": "tpuflow.lower.assemble.emit_node"}
    if stage in names:
        monkeypatch.setattr(names[stage], _breaks)
    with pytest.raises(IndexError) as caught:
        compile_graph(graph, passes=(_Breaks(),) if stage == "breaks" else ())
    assert any(stage in note and "test_compiler.py" in note for note in caught.value.__notes__)
