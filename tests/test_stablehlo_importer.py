"""The importer of StableHLO: the bits of what comes as a jaxpr, the user's lines and scopes, and errors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import tpuflow
from tpuflow.cli import main
from tpuflow.compiler import compile_stablehlo
from tpuflow.device.runtime import Executable
from tpuflow.errors import ConfigError, ModuleError, UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.isa.calls import HOST_CALL
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.jaxpr import lower_jaxpr
from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo


def text_of(fn: Any, *args: Any, platform: str = "cpu", **options: Any) -> str:
    return jax.jit(fn, keep_unused=True, **options).trace(*args).lower(lowering_platforms=(platform,)).as_text(debug_info=True)


def graph_of(fn: Any, *args: Any, platform: str = "cpu") -> Graph:
    return verify(lower_stablehlo(text_of(fn, *args, platform=platform)).graph)


def module(body: str, signature: str = "(%a: tensor<2xf32>) -> tensor<2xf32>", others: str = "") -> str:
    return f"module {{ func.func @main{signature} {{ {body} }} {others} }}"


# --- what is found again ------------------------------------------------------------------------------------------------


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.walk() if node.op != "full"]


def test_a_scan_is_a_counted_loop_whose_indices_need_no_bounds() -> None:
    def running(x: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x)

    x = np.ones((5, 3), np.float32)
    graph = graph_of(running, x)
    assert "loop" in ops(graph) and not {"while", "min", "max"} & set(ops(graph))
    assert sorted(ops(graph)) == sorted(ops(lower_jaxpr(jax.make_jaxpr(running)(x), "running")))


def test_a_loop_whose_end_is_computed_stays_a_while_loop() -> None:
    graph = graph_of(lambda n, x: jax.lax.fori_loop(0, n, lambda i, c: c * 2 + i, x), np.int32(3), np.float32(1))
    assert "while" in ops(graph)
    assert interpret(graph, np.int32(3), np.float32(1))[0] == 12


HOISTED = """
%zero = stablehlo.constant dense<0.0> : tensor<f32>  %first = stablehlo.constant dense<0> : tensor<i32>
%one = stablehlo.constant dense<1> : tensor<i32>     %last = stablehlo.constant dense<3> : tensor<i32>
%0:2 = stablehlo.while(%i = %first, %x = %a) : tensor<i32>, tensor<4xf32>
  cond { %t = stablehlo.compare LT, %i, %last : (tensor<i32>, tensor<i32>) -> tensor<i1>  stablehlo.return %t : tensor<i1> }
  do { %n = stablehlo.add %i, %one : tensor<i32>  %y = stablehlo.add %x, %x : tensor<4xf32>
       stablehlo.return %n, %y : tensor<i32>, tensor<4xf32> }
%1 = "stablehlo.reduce"(%0#1, %zero) ({ ^bb(%p: tensor<f32>, %q: tensor<f32>):
  %s = stablehlo.add %p, %q : tensor<f32>  stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 0>}
  : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
return %1 : tensor<f32>
"""
"""As MLIR's own passes leave a module: every constant in the outermost block."""


def test_numbers_that_mlir_has_moved_out_of_a_region_are_known_in_it() -> None:
    graph = lower_stablehlo(module(HOISTED, "(%a: tensor<4xf32>) -> tensor<f32>")).graph
    assert "loop" in ops(graph) and "while" not in ops(graph)
    assert interpret(graph, np.arange(4, dtype=np.float32))[0] == 8 * 6


@pytest.mark.parametrize(("index", "branch"), [(-1, 2), (0, 0), (1, 1), (2, 2), (9, 2)])
def test_a_case_beyond_its_branches_takes_the_last(index: int, branch: int) -> None:
    branches = ", ".join(
        f"{{ %c{i} = stablehlo.constant dense<{i}.0> : tensor<2xf32> stablehlo.return %c{i} : tensor<2xf32> }}" for i in range(3)
    )
    text = module(
        f'%0 = "stablehlo.case"(%i) ({branches}) : (tensor<i32>) -> tensor<2xf32> return %0 : tensor<2xf32>',
        "(%i: tensor<i32>) -> tensor<2xf32>",
    )
    assert interpret(lower_stablehlo(text).graph, np.int32(index))[0].tolist() == [branch, branch]


def test_what_a_user_writes_out_is_not_taken_for_the_primitive() -> None:
    x = np.linspace(-3, 3, 33).astype(jnp.bfloat16)
    assert "convert" in ops(graph_of(jax.nn.sigmoid, x))  # computed in f32, rounded once
    assert "convert" not in ops(graph_of(lambda x: 1 / (1 + jnp.exp(-x)), x))


def test_the_text_of_a_graph_is_that_of_the_jaxpr() -> None:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w).sum(0)

    x, w = np.ones((4, 5), np.float32), np.ones((5, 3), np.float32)
    ours = str(lower_stablehlo(text_of(layer, x, w), "f", input_names=("x", "w"), output_names=("y",)).graph)
    assert ours == str(lower_jaxpr(jax.make_jaxpr(layer)(x, w), "f", input_names=("x", "w"), output_names=("y",)))


# --- what a module says -------------------------------------------------------------------------------------------------


def test_arguments_and_results_keep_their_names_types_and_what_may_be_overwritten() -> None:
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + x}, x.sum()

    text = jax.jit(step, donate_argnums=0).lower({"w": np.ones(3, np.float32)}, np.ones(3, np.float32)).as_text(debug_info=True)
    imported = lower_stablehlo(text)
    assert imported.graph.name == "step" and imported.graph.input_names == ("state['w']", "x")
    assert imported.graph.output_names == ("result[0]['w']", "result[1]")
    assert (imported.donated, imported.aliases) == ((True, False), (0, None))
    assert [str(t) for t in (*imported.input_types, *imported.output_types)] == ["f32[3]", "f32[3]", "f32[3]", "f32[]"]
    assert [p.donated for p in compile_stablehlo(imported).inputs] == [True, False]
    assert [p.donated for p in compile_stablehlo(imported, donated=(False, False)).inputs] == [False, False]
    with pytest.raises(ConfigError, match="1 entries in donated for 2"):
        compile_stablehlo(imported, donated=(True,))


def test_nodes_have_the_users_line_and_scope_inside_of_calls_and_loops_too() -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("outer"):
            y = jax.nn.relu(x)
            return jax.lax.scan(lambda c, row: (jnp.sin(c) + row, None), y[0], y)[0]

    nodes = {node.op: node for node in graph_of(step, np.ones((3, 4), np.float32)).walk()}
    assert {nodes[op].scope for op in ("max", "sin", "loop")} == {"outer"}
    assert all(nodes[op].source.startswith("test_stablehlo_importer.py:") for op in ("max", "sin", "loop"))


def test_a_host_call_goes_to_the_function_of_its_number() -> None:
    text = module(
        f'stablehlo.custom_call @{HOST_CALL}(%a) {{backend_config = "0", has_side_effect = true}} : (tensor<2xf32>) -> () '
        "return %a : tensor<2xf32>"
    )
    seen: list[Any] = []
    imported = lower_stablehlo(text, host_functions=[seen.append])
    assert len(imported.calls) == 1 and "outfeed" in ops(imported.graph)
    with pytest.raises(UnsupportedPrimitiveError, match="host function '0' is not one of the 0"):
        lower_stablehlo(text)


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", ModuleError, "no function @main"),
        ("hello", ModuleError, "not a StableHLO module"),
        (module('return %a : tensor<2xf32>', '(%a: tensor<2xf32> {x = "\\FF"}) -> tensor<2xf32>'), ModuleError, "not a StableHLO module"),
        (module("return %a : tensor<?xf32>", "(%a: tensor<?xf32>) -> tensor<?xf32>"), UnsupportedDtypeError, "shape is not known"),
        (module("return %a : tensor<2xf64>", "(%a: tensor<2xf64>) -> tensor<2xf64>"), UnsupportedDtypeError, "64-bit.*Cast"),
        (module("return %a : tensor<complex<f32>>", "(%a: tensor<complex<f32>>) -> tensor<complex<f32>>"), TypeError, "complex"),
        (
            module("%0 = stablehlo.custom_call @foo(%a) : (tensor<2xf32>) -> tensor<2xf32> return %0 : tensor<2xf32>"),
            UnsupportedPrimitiveError, r"line 1 .*custom_call @foo.*f32\[2\]",
        ),
        (
            module("%0 = func.call @main(%a) : (tensor<2xf32>) -> tensor<2xf32> return %0 : tensor<2xf32>"),
            UnsupportedPrimitiveError, "calls itself",
        ),
        (module("cf.br ^bb1 ^bb1: return %a : tensor<2xf32>"), UnsupportedPrimitiveError, "branch"),
        (
            module("%0 = stablehlo.tuple %a : tuple<tensor<2xf32>> return %0 : tuple<tensor<2xf32>>", "(%a: tensor<2xf32>) -> "
            "tuple<tensor<2xf32>>"), UnsupportedPrimitiveError, "line 1 of the module: 'func.return' on a tuple",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_refused_and_said_why(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        lower_stablehlo(text)


def test_tuples_of_tuples_are_taken_apart_where_they_are_made() -> None:
    text = module(
        "%0 = stablehlo.tuple %a : tuple<tensor<2xf32>> "
        "%1 = stablehlo.tuple %a, %0 : tuple<tensor<2xf32>, tuple<tensor<2xf32>>> "
        "%2 = stablehlo.get_tuple_element %1[1] : (tuple<tensor<2xf32>, tuple<tensor<2xf32>>>) -> tuple<tensor<2xf32>> "
        "%3 = stablehlo.get_tuple_element %2[0] : (tuple<tensor<2xf32>>) -> tensor<2xf32> "
        "%4 = stablehlo.negate %3 : tensor<2xf32> return %4 : tensor<2xf32>"
    )
    assert ops(lower_stablehlo(text).graph) == ["neg"]


@pytest.mark.parametrize(
    ("op", "kind", "operand", "source", "start", "expected"),
    [
        ("or", "i32", [5, 1, 2, 0], [3, 4, 6], "0", [3, 0, 6, 0]),
        ("xor", "i32", [5, 1, 2, 0], [3, 4, 6], "1", [2, 1, 3, 1]),
        ("add", "i32", [5, 1, 2, 0], [3, 4, 6], "1", [4, 1, 11, 1]),
        ("or", "i1", [True, False, True, False], [False, True, False], "false", [False, False, True, False]),
    ],
)
def test_sources_of_windows_are_combined_by_what_has_an_identity_of_zero(
    op: str, kind: str, operand: list[int], source: list[int], start: str, expected: list[int]
) -> None:
    """The first element wins one window, the third two."""
    text = module(
        f"""%c = stablehlo.constant dense<{start}> : tensor<{kind}>
        %0 = "stablehlo.select_and_scatter"(%a, %b, %c) <{{window_dimensions = array<i64: 2>}}> ({{
        ^bb0(%x: tensor<{kind}>, %y: tensor<{kind}>):
          %1 = stablehlo.compare GE, %x, %y : (tensor<{kind}>, tensor<{kind}>) -> tensor<i1>
          stablehlo.return %1 : tensor<i1>
        }}, {{
        ^bb0(%x: tensor<{kind}>, %y: tensor<{kind}>):
          %1 = stablehlo.{op} %x, %y : tensor<{kind}>
          stablehlo.return %1 : tensor<{kind}>
        }}) : (tensor<4x{kind}>, tensor<3x{kind}>, tensor<{kind}>) -> tensor<4x{kind}>
        return %0 : tensor<4x{kind}>""",
        f"(%a: tensor<4x{kind}>, %b: tensor<3x{kind}>) -> tensor<4x{kind}>",
    )
    program = compile_stablehlo(lower_stablehlo(text))
    arrays = [np.array(x, bool if kind == "i1" else np.int32) for x in (operand, source)]
    for engine in ("reference", "fast"):
        (got,), _ = Executable(program, engine=engine).launch(arrays)
        assert np.asarray(got).tolist() == expected


def test_the_only_device_has_the_number_zero() -> None:
    ids = "%p = stablehlo.partition_id : tensor<ui32> %r = stablehlo.replica_id : tensor<ui32>"
    text = module(f"{ids} return %p, %r : tensor<ui32>, tensor<ui32>", "() -> (tensor<ui32>, tensor<ui32>)")
    with pytest.raises(UnsupportedPrimitiveError, match="mesh that the module does not name"):
        lower_stablehlo(text)
    alone = text.replace("module {", "module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {", 1)
    assert [x.item() for x in Executable(compile_stablehlo(alone)).launch([])[0]] == [0, 0]


def test_what_keeps_a_value_from_being_dropped_computes_nothing() -> None:
    text = module("stablehlo.custom_call @dce_sink(%a) {has_side_effect = true} : (tensor<2xf32>) -> () return %a : tensor<2xf32>")
    assert not ops(lower_stablehlo(text).graph)


def test_an_operation_without_a_rule_is_named_with_its_line_and_what_to_do() -> None:
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_stablehlo_importer\.py:\d+.*lapack_sgees.*matrix decomposition"):
        lower_stablehlo(text_of(jax.lax.linalg.schur, np.eye(3, dtype=np.float32)))


def test_functions_that_call_one_another_ever_more_often_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuflow.lower.importers.stablehlo.walk.MOST_OPERATIONS", 1000)
    kind = "(tensor<2xf32>) -> tensor<2xf32>"
    chain = " ".join(
        f"func.func private @f{i}(%x: tensor<2xf32>) -> tensor<2xf32> {{ %0 = func.call @f{i + 1}(%x) : {kind} "
        f"%1 = func.call @f{i + 1}(%0) : {kind} return %1 : tensor<2xf32> }}"
        for i in range(30)
    )
    last = "func.func private @f30(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"
    with pytest.raises(tpuflow.errors.CompileError, match="after inlining"):
        lower_stablehlo(module(f"%0 = func.call @f0(%a) : {kind} return %0 : tensor<2xf32>", others=chain + last))


def test_damaged_bytecode_is_an_error_and_not_the_end_of_the_process() -> None:
    data = export.export(jax.jit(lambda x: jnp.tanh(x) + 1))(np.ones(3, np.float32)).mlir_module_serialized
    assert lower_stablehlo(data).graph.outputs
    rng = np.random.default_rng(0)
    for _ in range(6):
        damaged = bytearray(data)
        for place in rng.integers(40, len(data), 3):
            damaged[place] ^= 0xFF
        with pytest.raises((ModuleError, UnsupportedPrimitiveError, UnsupportedDtypeError)):
            lower_stablehlo(bytes(damaged))
    with pytest.raises(ModuleError):
        lower_stablehlo(data[: len(data) // 2])


# --- doors --------------------------------------------------------------------------------------------------------------


def _layer(x: Any, w: Any, unused: Any) -> Any:
    return jnp.tanh(x @ w).sum(0)


def test_exported_functions_run_as_part_of_a_jitted_one() -> None:
    x, w = np.ones((2, 4), np.float32), np.full((4, 3), 0.1, np.float32)
    expected = tpuflow.jit(_layer, engine="reference")(x, w, 0.0)
    for platforms in (("cpu",), ("tpu", "cpu")):
        exported = export.export(jax.jit(_layer), platforms=platforms)(x, w, 0.0)
        found = tpuflow.jit(exported.call, engine="reference")(x, w, np.float32(0))
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_the_command_line_compiles_text_and_artifacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, w = np.ones((2, 4), np.float32), np.full((4, 3), 0.1, np.float32)
    (tmp_path / "layer.mlir").write_text(text_of(lambda x, w: _layer(x, w, 0), x, w))
    exported = export.export(jax.jit(lambda x, w: _layer(x, w, 0)))(x, w)
    (tmp_path / "layer.bin").write_bytes(exported.mlir_module_serialized)
    (tmp_path / "layer.exported").write_bytes(exported.serialize())
    assert main(["compile", str(tmp_path / "layer.mlir")]) == 0
    assert main(["compile", str(tmp_path / "layer.bin"), "-o", str(tmp_path / "other.tpx")]) == 0
    assert main(["compile", str(tmp_path / "layer.exported"), "-o", str(tmp_path / "third.tpx")]) == 0
    assert "input    x: f32[2, 4]" in capsys.readouterr().out
    programs = (Executable.load(tmp_path / name, engine="reference") for name in ("layer.tpx", "other.tpx", "third.tpx"))
    results = [np.asarray(e.launch([x, w])[0][0]).tobytes() for e in programs]
    assert results[0] == results[1] == results[2] == np.asarray(tpuflow.jit(_layer, engine="reference")(x, w, 0.0)).tobytes()
    (tmp_path / "damaged.mlir").write_bytes(b"\xff\xfe\x00" * 20)
    assert main(["compile", str(tmp_path / "damaged.mlir")]) == 2
    assert "damaged.mlir" in capsys.readouterr().err
