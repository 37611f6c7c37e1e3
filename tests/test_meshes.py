"""Programs on several chips: the same Program on every chip of a mesh, joined by collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import tpuflow
from tests.partitioning import mesh_of
from tests.tolerances import sum_bound
from tpuflow.device.runtime import Executable
from tpuflow.errors import ProgramError, UnsupportedPrimitiveError

pytestmark = pytest.mark.optimised

P = PartitionSpec
RNG = np.random.default_rng(0)
CLOSE = {"rtol": sum_bound(64), "atol": sum_bound(64)}
MESHES = ({"d": 1}, {"d": 2}, {"d": 4}, {"d": 8}, {"e": 2, "d": 4})


def by_vmap(fn: Callable[..., Any], sizes: dict[str, int], ins: Any, outs: Any) -> Callable[..., Any]:
    """`shard_map` made of `vmap`: what every chip has is a row of an array. One argument, results in a dictionary with specs `outs`."""
    names = list(sizes)

    def cut_over(spec: Any, rank: int) -> list[tuple[str, ...]]:
        rows = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        return rows + [()] * (rank - len(rows))

    def whole(x: Any) -> Any:
        rows, dims, where = cut_over(ins, x.ndim), [], {}
        for n, row in zip(x.shape, rows, strict=True):
            for name in row:
                where[name] = len(dims)
                dims.append(sizes[name])
                n //= sizes[name]
            dims.append(n)
        x = x.reshape(dims)
        kept = [i for i in range(len(dims)) if i not in where.values()]
        x = x.transpose([*(where[n] for n in names if n in where), *kept])
        axes = [0 if name in where else None for name in names]
        mapped = fn
        for name, axis in reversed(list(zip(names, axes, strict=True))):
            mapped = jax.vmap(mapped, in_axes=axis, axis_name=name, axis_size=sizes[name])
        return {key: joined(value, outs[key]) for key, value in mapped(x).items()}

    def joined(x: Any, spec: Any) -> Any:
        rows = cut_over(spec, x.ndim - len(names))
        used = [name for row in rows for name in row]
        x = x[tuple(slice(None) if name in used else 0 for name in names)]
        present = [name for name in names if name in used]
        order, shape = [], []
        for d, row in enumerate(rows):
            order += [*(present.index(name) for name in row), len(present) + d]
            shape.append(int(np.prod([sizes[name] for name in row], initial=x.shape[len(present) + d])))
        return x.transpose(order).reshape(shape)

    return whole


def everything(x: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Every collective on a chip's piece, [8, 8]: over d, and where there is an axis e over both."""
    n, both = sizes["d"], tuple(sizes)
    shift = [(k, (k + 1) % n) for k in range(n)]
    found = {
        "psum": lax.psum(x, "d"),
        "psum of a product": x * lax.pmean(jnp.mean(x * x), both),
        "pmean": x - lax.pmean(x, both),
        "all_gather": lax.all_gather(x, "d", axis=1).sum(1),
        "all_gather, tiled": lax.all_gather(x, "d", axis=1, tiled=True)[:, -8:],
        "psum_scatter": jnp.tile(lax.psum_scatter(x[:n], "d"), (8, 1)),
        "psum_scatter, tiled": jnp.tile(lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True), (1, n)),
        "all_to_all": lax.all_to_all(x, "d", 1, 0, tiled=True).reshape(8, 8),
        "ppermute": lax.ppermute(x, "d", shift),
        "axis_index": x * (lax.axis_index("d") + 1) * (lax.axis_index(both) + 1),
        "odd": jnp.zeros((8, 8)).at[:3, :5].set(lax.psum(x[:3, :5], both)),
    }
    return found


def greatest(x: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Those that JAX has no gradient of."""
    return {"pmax": lax.pmax(x, tuple(sizes)), "pmin": lax.pmin(x, "d")}


def _specs(sizes: dict[str, int]) -> Any:
    return P("d", "e") if "e" in sizes else P("d")


def _mapped(fn: Any, sizes: dict[str, int], keys: Any) -> tuple[Any, Any]:
    """(over the chips, over the lanes of `vmap`): [d * 8, e * 8] -> the same of every key."""
    ins, outs = _specs(sizes), dict.fromkeys(keys, _specs(sizes))
    one = partial(fn, sizes=sizes)
    return jax.shard_map(one, mesh=mesh_of(sizes), in_specs=ins, out_specs=outs, check_vma=False), by_vmap(one, sizes, ins, outs)


def _weighed(fn: Any) -> Any:
    return jax.grad(lambda x: sum(jnp.sum(jnp.sin(v) * (k + 1)) for k, v in enumerate(fn(x).values())))


def engines(fn: Any, *arguments: Any, fidelities: tuple[str, ...] = ("bitexact",)) -> tuple[list[np.ndarray], ...]:
    """What the reference engine gives for one Program, and the fast one in some fidelities."""
    program = tpuflow.jit(fn).program(*arguments)
    leaves = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    loaded = [Executable(program, "reference"), *(Executable(program, "fast", f) for f in fidelities)]
    return tuple([np.asarray(x) for x in e.launch(leaves)[0]] for e in loaded)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=[" x ".join(f"{k}{n}" for k, n in m.items()) for m in MESHES])
def test_every_collective_and_its_gradient_is_what_vmap_gives_and_the_same_bits_on_both_engines(sizes: dict[str, int]) -> None:
    x = RNG.normal(size=(8 * sizes["d"], 8 * sizes.get("e", 1))).astype(np.float32)
    names = tuple(jax.eval_shape(by_vmap(partial(everything, sizes=sizes), sizes, _specs(sizes), _Same(_specs(sizes))), x))
    chips, lanes = _mapped(everything, sizes, names)
    most, lanes_most = _mapped(greatest, sizes, ("pmax", "pmin"))
    both, truth = (lambda x: (chips(x), most(x), _weighed(chips)(x))), (lambda x: (lanes(x), lanes_most(x), _weighed(lanes)(x)))
    expected = jax.tree.leaves(jax.jit(truth)(x))
    reference, exact = engines(both, x)
    for name, one, other, value in zip((*sorted(names), "pmax", "pmin", "gradient"), reference, exact, expected, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
        np.testing.assert_allclose(one, value, rtol=1e-5, atol=1e-4, err_msg=name)


class _Same(dict):
    """One spec for every key."""

    def __init__(self, spec: Any):
        super().__init__()
        self.spec = spec

    def __missing__(self, key: str) -> Any:
        return self.spec


HOST_DEVICES = """
import jax, numpy as np, tpuflow
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("e", "d"))

def step(x):
    return {
        "all_gather": lax.all_gather(x, ("d", "e"), axis=1, tiled=True).sum(1, keepdims=True),
        "psum_scatter": lax.psum_scatter(x, ("e", "d"), scatter_dimension=1, tiled=True),
        "all_to_all": lax.all_to_all(x, ("e", "d"), 1, 0, tiled=True),
        "ppermute": lax.ppermute(x, ("e", "d"), [(0, 3), (5, 1), (2, 2)]),
        "axis_index": x * lax.axis_index(("d", "e")),
        "psum": x - lax.psum(x, ("d", "e")),
    }

mapped = jax.shard_map(step, mesh=mesh, in_specs=P("e", "d"), out_specs=P("e", "d"))
x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
sharded = jax.device_put(x, NamedSharding(mesh, P("e", "d")))
assert len(sharded.devices()) == 8
found, expected = tpuflow.jit(mapped)(sharded), jax.jit(mapped)(sharded)
for name in expected:
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
"""


@pytest.mark.slow
def test_a_mesh_of_host_devices_gives_what_they_give_groups_over_two_axes_included() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", HOST_DEVICES], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# --- sums


def ring(pieces: np.ndarray) -> np.ndarray:
    """[chips, elems] of f16: part c is chip c + 1's, to which chip c + 2 adds its own, ..., at last chip c."""
    chips, elems = pieces.shape
    part = -(-elems // chips)
    total = np.zeros(elems, np.float16)
    for e in range(elems):
        c = e // part
        total[e] = pieces[(c + 1) % chips, e]
        for hop in range(2, chips + 1):
            total[e] = total[e] + pieces[(c + hop) % chips, e]
    return total


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_sum_goes_around_the_ring_and_rounds_once_a_hop(dtype: Any) -> None:
    x = RNG.normal(size=(4, 11)).astype(dtype)
    fn = jax.shard_map(lambda x: lax.psum(x, "d"), mesh=mesh_of({"d": 4}), in_specs=P("d"), out_specs=P())
    (reference,), (exact,), (native,) = engines(fn, x, fidelities=("bitexact", "native"))
    np.testing.assert_array_equal(reference, exact)
    np.testing.assert_array_equal(native, exact)
    if dtype == jnp.float16:
        np.testing.assert_array_equal(reference[0], ring(x))
        assert (reference[0] != ((x[0] + x[1]) + x[2]) + x[3]).any()


def test_a_sum_is_scattered_and_gathered_with_the_same_bits() -> None:
    x = RNG.normal(size=(8, 16)).astype(np.float32)
    mesh = mesh_of({"e": 2, "d": 4})

    def step(x: Any) -> Any:
        part = lax.psum_scatter(x[0], ("e", "d"), tiled=True)
        return lax.psum(x[0], ("e", "d")), lax.all_gather(part, ("e", "d"), tiled=True)

    fn = jax.shard_map(step, mesh=mesh, in_specs=P(("e", "d")), out_specs=P(), check_vma=False)
    for summed, gathered in engines(fn, x):
        np.testing.assert_array_equal(summed, gathered)


# --- programs


def test_what_lies_around_the_map_runs_on_every_chip_and_arrays_are_cut_where_they_can_be() -> None:
    mesh = mesh_of({"d": 4})
    double = jax.shard_map(lambda x: x * 2 + lax.axis_index("d"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    total = jax.shard_map(lambda x: lax.psum(x, "d"), mesh=mesh, in_specs=P(None, "d"), out_specs=P())
    fn = jax.jit(lambda x: (double(x), total(double(x).T @ x)))
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    doubled = x * 2 + np.repeat(np.arange(4), 2)[:, None]
    program = tpuflow.jit(fn).program(x)
    assert [p.cut for p in program.inputs] == [()]  # used whole, too
    assert [p.cut for p in program.outputs] == [((0,), ()), ()]
    for found in engines(fn, x, fidelities=("native",)):
        np.testing.assert_allclose(found[0], doubled, **CLOSE)
        np.testing.assert_allclose(found[1], (doubled.T @ x).reshape(4, 4, 1).sum(1), rtol=1e-5, atol=1e-4)
    program = tpuflow.jit(double).program(x)
    assert [p.shape for p in (*program.inputs, *program.outputs)] == [(2, 4)] * 2


def test_chips_may_loop_as_often_as_they_like_but_not_come_to_collectives_so() -> None:
    mesh = mesh_of({"d": 4})

    def apart(x: Any) -> Any:
        turns = lax.fori_loop(0, lax.axis_index("d"), lambda _, x: x * 2, x)
        bounded = lax.while_loop(lambda x: jnp.sum(x) < 100.0, lambda x: x * 3, x)
        return turns, lax.cond(lax.axis_index("d") > 1, lambda x: x + 1, lambda x: x - 1, bounded), lax.psum(turns, "d")

    fn = jax.shard_map(apart, mesh=mesh, in_specs=P("d"), out_specs=(P("d"), P("d"), P()), check_vma=False)
    x = np.abs(RNG.normal(size=(4, 3)).astype(np.float32)) + 1
    reference, exact = engines(fn, x)
    for one, other in zip(reference, exact, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(reference[0], x * np.array([[1], [2], [4], [8]], np.float32))

    def together(x: Any) -> Any:
        return lax.fori_loop(0, lax.axis_index("d"), lambda _, x: lax.psum(x, "d"), x)

    fn = jax.shard_map(together, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    with pytest.raises(ProgramError, match=r"collective .* lies in (while|loop) .* which chips may run differently.*test_meshes\.py"):
        tpuflow.jit(fn)(x)


def test_complex_arrays_are_cut_gathered_and_compared() -> None:
    z = np.round(RNG.normal(size=(8, 3)) + 1j * RNG.normal(size=(8, 3))).astype(np.complex64)

    def parts(x: Any) -> Any:
        return {"most": lax.pmax(x, "d"), "least": lax.pmin(x.min(0), "d"), "sum": lax.psum(x, "d"), "turned": x * 1j}

    outs = {"most": P(), "least": P(), "sum": P(), "turned": P("d")}
    fn = jax.shard_map(parts, mesh=mesh_of({"d": 4}), in_specs=P("d"), out_specs=outs)
    rows = z.reshape(4, 2, 3)
    want = {"most": jnp.max(rows, 0), "least": jnp.min(z, 0), "sum": rows.sum(0), "turned": z * 1j}
    for engine in ("reference", "fast"):
        jax.tree.map(np.testing.assert_array_equal, tpuflow.jit(fn, engine=engine)(z), want)


def test_two_meshes_in_one_program_are_refused() -> None:
    one, other = (jax.shard_map(lambda x: lax.psum(x, "d"), mesh=mesh_of({"d": n}), in_specs=P("d"), out_specs=P()) for n in (2, 4))
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_meshes\.py:\d+.*over \{'d': 4\}.*one over \{'d': 2\}.*one mesh"):
        tpuflow.jit(lambda x: one(x)[0] + other(x)[0])(np.ones((8, 3), np.float32))


@pytest.mark.slow
def test_convolutions_with_lanes_on_both_sides_have_the_bits_of_the_reference_engine() -> None:
    """The gradient of a kernel on every chip of two axes: images and cotangents differ from chip to chip."""
    x, w = RNG.normal(size=(8, 6, 6, 3)).astype(np.float32), RNG.normal(size=(3, 3, 3, 8)).astype(np.float32)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))))

        return lax.psum(jax.grad(loss)(w), ("e", "d"))

    fn = jax.shard_map(step, mesh=mesh_of({"e": 2, "d": 2}), in_specs=(P(), P(("e", "d"))), out_specs=P(), check_vma=False)
    (reference,), (exact,), (native,) = engines(fn, w, x, fidelities=("bitexact", "native"))
    np.testing.assert_array_equal(reference, exact)
    np.testing.assert_allclose(native, exact, rtol=1e-4, atol=1e-4)
