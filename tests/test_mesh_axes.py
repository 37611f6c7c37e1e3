"""The axes of a mesh, the groups of chips along them, and the sums over these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tests.partitioning import CLOSE, MESH, SIZES, P, cut, floats, kept, kinds
from tpuflow.compiler import compile_jaxpr, compile_stablehlo
from tpuflow.device.runtime import Executable
from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.isa.collectives import MeshAxis
from tpuflow.isa.meshes import axes_grouped, axes_numbered, axes_ordered, divided, places
from tpuflow.lower.create_reduce_scatters import create_reduce_scatters
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo
from tpuflow.lower.reassociate_all_reduces import reassociate_all_reduces
from tpuflow.lower.shards import Cuts


def test_axes_are_known_by_the_groups_and_the_numbers_of_their_devices() -> None:
    sizes = {"a": 2, "one": 1, "b": 3, "c": 2}
    for count in range(4):
        for names in permutations("abc", count):
            numbers = places(sizes, names)
            others = places(sizes, [name for name in sizes if name not in names])
            groups = np.lexsort((numbers, others)).reshape(-1, int(numbers.max()) + 1)
            assert axes_numbered(numbers, sizes) == names == axes_grouped(groups, sizes)


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 2, 3], [5, 4, 6, 7]], [[0, 1], [2, 3]], [[0, 0], [1, 1]]])
def test_groups_that_are_no_axes_are_told_from_those_that_are(groups: list[list[int]]) -> None:
    assert axes_grouped(np.array(groups), SIZES) is None


@pytest.mark.parametrize("members", list(permutations(range(4))))
def test_groups_go_over_axes_whatever_order_their_members_are_in(members: tuple[int, ...]) -> None:
    rows = np.arange(8).reshape(2, 4)
    for groups in (rows[:, members], np.stack([rows[0, members], rows[1]])):
        found = axes_ordered(groups, SIZES)
        assert found is not None and found[0] == ("model",)
        np.testing.assert_array_equal(found[1], rows)
    assert axes_ordered(np.array([[0, 1], [2, 5], [4, 3], [6, 7]]), SIZES) is None


@pytest.mark.parametrize(("sizes", "groups", "parts"), [
    ({"a": 8}, [[[0, 1], [2, 3], [4, 5], [6, 7]]], {"a": {"a.0": 4, "a.1": 2}}),
    ({"a": 8}, [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]], {"a": {"a.0": 2, "a.1": 2, "a.2": 2}}),
    ({"a": 2, "b": 4}, [[[0, 2, 4, 6], [1, 3, 5, 7]]], {"a": {"a": 2}, "b": {"b.0": 2, "b.1": 2}}),
    ({"a": 2, "b": 4}, [[[0, 4], [1, 5], [2, 6], [3, 7]]], {"a": {"a": 2}, "b": {"b": 4}}),
    ({"a": 12, "one": 1}, [np.arange(12).reshape(3, 4).tolist()], {"a": {"a.0": 3, "a.1": 4}, "one": {"one": 1}}),
    ({"a": 12}, [np.arange(12).reshape(4, 3).tolist()], {"a": {"a.0": 4, "a.1": 3}}),
    ({"a": 12}, [np.arange(12).reshape(3, 4).tolist(), np.arange(12).reshape(4, 3).tolist()], None),
    ({"a": 4}, [[[0, 3], [1, 2]]], None),
])  # fmt: skip
def test_axes_are_divided_into_as_few_parts_as_groups_of_devices_need(sizes: Any, groups: Any, parts: Any) -> None:
    found = divided(sizes, lambda finer: all(axes_grouped(np.array(g), finer) is not None for g in groups))
    wanted = parts and ({n: size for own in parts.values() for n, size in own.items()}, {name: tuple(own) for name, own in parts.items()})
    assert found == wanted


def test_members_of_groups_in_any_order_send_and_receive_by_their_number_in_it() -> None:
    groups = np.array([[1, 2, 3, 0], [5, 7, 6, 4]])
    options = f"""channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
        replica_groups = dense<{groups.tolist()}> : tensor<2x4xi64>"""
    module = f"""module {{ func.func @main(%x: tensor<1x4xf32>) -> (tensor<4x4xf32>, tensor<4x1xf32>, tensor<1x1xf32>) {{
      %0 = "stablehlo.all_gather"(%x) <{{{options}, all_gather_dim = 0 : i64, use_global_device_ids}}>
        : (tensor<1x4xf32>) -> tensor<4x4xf32>
      %1 = "stablehlo.all_to_all"(%x) <{{{options}, split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 4 : i64}}>
        : (tensor<1x4xf32>) -> tensor<4x1xf32>
      %2 = "stablehlo.reduce_scatter"(%x) <{{{options}, scatter_dimension = 1 : i64, use_global_device_ids}}> ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32>
      }}) : (tensor<1x4xf32>) -> tensor<1x1xf32>
      return %0, %1, %2 : tensor<4x4xf32>, tensor<4x1xf32>, tensor<1x1xf32> }} }}"""
    cut_rows = (("data", "model"), ())
    imported = replace(
        lower_stablehlo(module, mesh=SIZES), mesh=(MeshAxis("data", 2), MeshAxis("model", 4)), cuts=Cuts((cut_rows,), (cut_rows,) * 3)
    )
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    found, _ = Executable(compile_stablehlo(imported), engine="reference").launch([x])
    of = {int(device): (group, k) for group in groups for k, device in enumerate(group)}
    gathered, sent, summed = ([row(*of[device]) for device in range(8)] for row in (
        lambda group, k: x[group], lambda group, k: x[group, k, None], lambda group, k: x[group, k].sum(keepdims=True)[None],
    ))  # fmt: skip
    for got, wanted in zip(found, (gathered, sent, summed), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(wanted))


@pytest.mark.parametrize(("groups", "mesh", "text"), [
    ("[[0, 3], [1, 2]]", {"a": 4}, "are neither axes of the mesh"), ("[[0, 1, 2, 3]]", None, "mesh that the module does not name"),
])  # fmt: skip
def test_a_modules_groups_must_be_axes_of_a_mesh(groups: str, mesh: Any, text: str) -> None:
    members = len(groups.split("]")[0].split(","))
    rows = groups.count("[") - 1
    module = f"""module {{ func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {{
      %0 = "stablehlo.all_reduce"(%a) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
        replica_groups = dense<{groups}> : tensor<{rows}x{members}xi64>, use_global_device_ids}}> ({{
        ^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32> stablehlo.return %s : tensor<f32>
      }}) : (tensor<2xf32>) -> tensor<2xf32> return %0 : tensor<2xf32> }} }}"""
    with pytest.raises(UnsupportedPrimitiveError, match=text):
        lower_stablehlo(module, mesh=mesh)


# --- sums


def imported(fn: Any, x: Any) -> Graph:
    """The graph that the chips start from."""
    found: list[Graph] = []
    compile_jaxpr(jax.make_jaxpr(fn)(x), name="step", watch=lambda stage, graph: found.append(graph))
    return found[0]


def test_a_sum_is_scattered_over_the_axes_that_its_part_is_cut_over_and_summed_over_the_others() -> None:
    def step(x: Any) -> Any:
        total = lax.psum(lax.psum(x, "model"), "data")
        return lax.dynamic_slice_in_dim(total, lax.axis_index("model") * 3, 3, 1)

    mapped = jax.shard_map(step, mesh=MESH, in_specs=P("data", "model"), out_specs=P(None, "model"), check_vma=False)
    graph = imported(mapped, floats(16, 48))
    found = [node for node in create_reduce_scatters(graph, SIZES).nodes if node.op == "collective"]
    assert [(n.attrs["kind"], n.attrs["axes"], n.result.shape) for n in found] == [
        ("reduce_scatter", ("model",), (8, 3)), ("all_reduce", ("data",), (8, 3)),
    ]  # fmt: skip
    assert create_reduce_scatters(create_reduce_scatters(graph, SIZES), SIZES).outputs[0].type == graph.outputs[0].type


@pytest.mark.parametrize("start", ["axis_index * 2", "axis_index * 3, and the sum is used twice", "0"])
def test_sums_of_which_another_piece_is_taken_stay_as_they_are(start: str) -> None:
    def step(x: Any) -> Any:
        total = lax.psum(x, "model")
        at = 0 if start == "0" else lax.axis_index("model") * (2 if "2" in start else 3)
        piece = lax.dynamic_slice_in_dim(total, at, 3, 1)
        return piece + total[:, :3] if "twice" in start else piece

    mapped = jax.shard_map(step, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False)
    graph = imported(mapped, floats(16, 48))
    assert str(create_reduce_scatters(graph, SIZES)) == str(graph)


JOINED: dict[str, tuple[Callable[..., Any], int]] = {
    "three": (lambda one, two, x: (one + two) + lax.psum(x * 5, "model"), 1),
    "one read twice": (lambda one, two, x: (one + two) * one, 2),
    "over other chips": (lambda one, two, x: one + lax.psum(x, "data") * two, 3),
    "a whole array": (lambda one, two, x: (one + x) * two, 2),
    "its own double": (lambda one, two, x: (one + one) * two, 2),
}
"""Of two sums over the chips of one axis and what is summed, and how many are sent."""


@pytest.mark.parametrize("name", JOINED)
def test_sums_over_the_same_chips_that_are_added_are_sent_as_one(name: str) -> None:
    fn, sums = JOINED[name]

    def step(x: Any) -> Any:
        return fn(lax.psum(x * 2, "model"), lax.psum(x * 3, "model"), x)

    graph = imported(
        jax.shard_map(step, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False), floats(16, 48)
    )
    found = verify(reassociate_all_reduces(graph))
    assert sum(node.op == "collective" for node in found.nodes) == sums
    assert str(reassociate_all_reduces(found)) == str(found)


@pytest.mark.parametrize(("rest", "kind"), [((), "all_reduce"), (("model",), "reduce_scatter")])
def test_tensor_parallel_products_of_one_array_send_its_gradient_once(rest: tuple[str, ...], kind: str) -> None:
    """Queries, keys and values, or a gate and what it gates: whole, or in the pieces that it lies in."""

    def loss(x: Any, weights: Any, lies: Callable[..., Any] = lambda x, *_: x) -> Any:
        one, two, three = (jnp.sin(lies(lies(x, "data", *rest), "data") @ w) for w in weights)
        return jnp.sum(one * two + three)

    def step(x: Any, weights: Any) -> Any:
        return jax.grad(loss)(x, weights, kept)

    x, weights = floats(16, 32), tuple(floats(32, 48) for _ in range(3))
    jitted = tpuflow.jit(step, in_shardings=(cut("data"), (cut(None, "model"),) * 3), out_shardings=cut("data", *rest))
    assert kinds(jitted.lower(x, weights).compile())[kind] == 1
    np.testing.assert_allclose(jitted(x, weights), jax.grad(loss)(x, weights), **CLOSE)
