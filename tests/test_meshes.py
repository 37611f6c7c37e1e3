"""Programs on several chips: the same Program on every chip of a mesh, joined by collectives."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, PartitionSpec

import tpuflow
from tests.program_builder import Builder, KernelBuilder
from tests.tolerances import sum_bound
from tpuflow.chips.links import all_reduce_seconds
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import time_program
from tpuflow.device.verify import verify
from tpuflow.dtypes import F32, S32
from tpuflow.errors import ConfigError, HazardError, ProgramError, UnsupportedPrimitiveError
from tpuflow.isa import vector
from tpuflow.isa.collectives import Await, Collective, MeshAxis, Position
from tpuflow.isa.program import Block, Kernel, Loop, Program, Switch

P = PartitionSpec
RNG = np.random.default_rng(0)
CLOSE = {"rtol": sum_bound(64), "atol": sum_bound(64)}
MESHES = ({"d": 1}, {"d": 2}, {"d": 4}, {"d": 8}, {"e": 2, "d": 4})


def mesh_of(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh of no devices."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


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


def test_two_meshes_in_one_program_are_refused() -> None:
    one, other = (jax.shard_map(lambda x: lax.psum(x, "d"), mesh=mesh_of({"d": n}), in_specs=P("d"), out_specs=P()) for n in (2, 4))
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_meshes\.py:\d+.*over \{'d': 4\}.*one over \{'d': 2\}.*one mesh"):
        tpuflow.jit(lambda x: one(x)[0] + other(x)[0])(np.ones((8, 3), np.float32))


# --- faults

N = 8


class Faulty:
    """A Program on four chips by hand: x is doubled, summed over the chips, and the sum is doubled again."""

    def __init__(self) -> None:
        self.b = Builder()
        self.x, self.y = self.b.input("x", F32, (N,)), self.b.buffer(F32, (N,))
        self.total, self.out = self.b.buffer(F32, (N,)), self.b.buffer(F32, (N,))
        self.start = Collective("all_reduce", "add", (0,), self.y, self.total, 0, where="model.py:7 (f)")
        self.wait = Await(0)

    def double(self, source: int, target: int) -> Kernel:
        """target = source + source."""
        k = KernelBuilder(self.b)
        made = k.tile(F32, (N,))
        read = k.load(k.window(source, k.tile(F32, (N,))))
        k.result(made, vector.Binary("add", made, read, read), window=k.window(target, made))
        k.release()
        return k.kernel()

    def program(self, *code: Block, mesh: tuple[MeshAxis, ...] = (MeshAxis("d", 4),)) -> Program:
        """With these blocks; what is in `out` goes out."""
        if not self.b.outputs:
            self.b.output("out", self.out)
        made = self.b.program(*code)
        inputs = tuple(dataclasses.replace(p, cut=((0,),)) if p.name == "x" else p for p in made.inputs)
        return dataclasses.replace(made, mesh=mesh, inputs=inputs)

    def run(self, program: Program, schedule: str = "late") -> np.ndarray:
        """Without the verifier."""
        x = np.arange(4 * N, dtype=np.float32)
        return ReferenceEngine(program, verify=False, schedule=schedule).launch([x])[0][0]


def test_a_program_by_hand_is_right_and_comes_back_from_its_file_and_its_text() -> None:
    f = Faulty()
    program = f.program(f.double(f.x, f.y), f.start, f.wait, f.double(f.total, f.out))
    verify(program)
    expected = 4 * np.arange(4 * N, dtype=np.float32).reshape(4, N).sum(0)
    for schedule in ("late", "early"):
        np.testing.assert_array_equal(f.run(program, schedule), expected)
    from tpuflow.isa import file
    from tpuflow.isa.assembler import assemble
    from tpuflow.isa.disassembler import disassemble

    assert file.from_bytes(file.to_bytes(program)) == assemble(disassemble(program)) == program
    assert file.from_bytes(file.to_bytes(program)).code[1].where == "model.py:7 (f)"  # type: ignore[union-attr]


FAULTS: dict[str, tuple[Callable[[Faulty], tuple[Block, ...]], str, str]] = {
    "a source that is overwritten while it is sent": (
        lambda f: (f.double(f.x, f.y), f.start, f.double(f.x, f.y), f.wait, f.double(f.total, f.out)),
        r"block 2: overwrites what is being sent by all_reduce 1 .*await of semaphore 0 before it\. \(model\.py:7 \(f\)\)",
        r"kernel 2.*writes buffer 1, which all_reduce 1 is sending \(model\.py:7 \(f\)\).*Source: kernel\.py:9",
    ),
    "a result that is read too early": (
        lambda f: (f.double(f.x, f.y), f.start, f.double(f.total, f.out), f.wait),
        r"block 2: reads what has not arrived yet from all_reduce 1",
        r"kernel 2.*reads what has not arrived yet in buffer 2.*Source: kernel\.py:2",
    ),
    "a target that is written before the sum is in it": (
        lambda f: (f.double(f.x, f.y), f.start, f.double(f.x, f.total), f.wait, f.double(f.total, f.out)),
        r"block 2: writes where something arrives from all_reduce 1",
        r"kernel 2.*writes buffer 2, which all_reduce 1 is still receiving",
    ),
    "a wait for nothing": (
        lambda f: (f.double(f.x, f.y), f.double(f.y, f.out), f.wait),
        r"await 2: nothing is on its way for semaphore 0",
        r"await 2: nothing is on its way for semaphore 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_meets_a_collective_is_refused_and_found_by_the_reference_engine(name: str) -> None:
    blocks, refused, found = FAULTS[name]
    f = Faulty()
    program = f.program(*blocks(f))
    with pytest.raises(ProgramError, match=refused):
        verify(program)
    for schedule in ("late", "early"):
        with pytest.raises(HazardError, match=found):
            f.run(program, schedule)


def test_chips_that_come_to_different_collectives_are_refused_and_named() -> None:
    f = Faulty()
    where, other = f.b.buffer(S32), dataclasses.replace(f.start, reducer="max", where="model.py:9 (f)")
    choice = Switch(where, ((f.start, f.wait), (other, f.wait)))
    program = f.program(f.double(f.x, f.y), Position(0, where), choice, f.double(f.y, f.out))
    with pytest.raises(ProgramError, match=r"collective 2\.branch0\.0: lies in switch 2, which chips may run differently.*model\.py:7"):
        verify(program)
    with pytest.raises(HazardError, match=r"chip 0 comes to all_reduce .* 2\.branch0\.0 \(model\.py:7 \(f\)\), chip 1 to .* 2\.branch1\.0"):
        f.run(program)


def _changed(**changes: Any) -> Callable[[Faulty], tuple[Block, ...]]:
    return lambda f: (f.double(f.x, f.y), dataclasses.replace(f.start, **changes), f.wait, f.double(f.total, f.out))


MISFITS: dict[str, tuple[Callable[[Faulty], tuple[Block, ...]], str]] = {
    "axis": (_changed(axes=(1,)), r"axes \[1\]; expected different ones of the 1 of the mesh"),
    "twice": (_changed(axes=(0, 0)), r"axes \[0, 0\]; expected different ones"),
    "no reducer": (_changed(reducer="none"), "expected one that combines"),
    "reducer": (_changed(kind="permute"), "has reducer 'add'; expected none"),
    "elements": (_changed(kind="reduce_scatter"), r"sends f32\[8\] and receives f32\[8\]; expected f32 of 2 elements"),
    "itself": (_changed(target=1), "share addresses; expected them apart"),
    "pairs": (_changed(kind="permute", reducer="none", pairs=((0, 1), (2, 1))), "a chip receives twice"),
    "strangers": (_changed(kind="permute", reducer="none", pairs=((0, 4),)), "not in the group of 4"),
    "buffer": (_changed(source=99), "buffer 99 does not exist"),
    "never awaited": (lambda f: (f.double(f.x, f.y), f.start, f.double(f.x, f.out)), "nobody waits for semaphore 0 before the end"),
    "semaphore": (
        lambda f: (f.double(f.x, f.y), f.start, dataclasses.replace(f.start, target=f.out), f.wait, f.wait),
        "semaphore 0 is taken by all_reduce 1, which is still on its way",
    ),
    "awaited elsewhere": (
        lambda f: (f.double(f.x, f.y), f.start, Loop(f.b.constant(1, S32), (f.wait,)), f.double(f.total, f.out)),
        r"await 2\.body\.0: nothing is on its way for semaphore 0 in this list",
    ),
    "nothing sent": (lambda f: (f.start, f.wait, f.double(f.total, f.out)), "sends buffer 1, which is not written"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_collective_that_does_not_fit_is_refused(name: str) -> None:
    blocks, refused = MISFITS[name]
    f = Faulty()
    with pytest.raises(ProgramError, match=refused):
        verify(f.program(*blocks(f)))


def test_a_mesh_and_its_cuts_are_checked() -> None:
    f = Faulty()
    code = (f.double(f.x, f.y), f.start, f.wait, f.double(f.total, f.out))
    for mesh, refused in (
        ((MeshAxis("d", 4), MeshAxis("d", 2)), "different names"),
        ((MeshAxis("d", 0),), "sizes of 1 at least"),
        ((MeshAxis("d", 2**21),), "at most 1048576 in all"),
    ):
        with pytest.raises(ProgramError, match=refused):
            verify(f.program(*code, mesh=mesh))
    program = f.program(*code)
    inputs = tuple(dataclasses.replace(p, cut=((1,),)) for p in program.inputs)
    with pytest.raises(ProgramError, match=r"input 'x' of shape \[8\] is cut \(\(1,\),\); expected .* 1 mesh axes"):
        verify(dataclasses.replace(program, inputs=inputs))


# --- training

LAYERS, BATCH = (16, 32, 24, 4), 16


def _parameters() -> list[tuple[np.ndarray, np.ndarray]]:
    sizes = itertools.pairwise(LAYERS)
    return [(RNG.normal(size=(m, n)).astype(np.float32) / m**0.5, np.zeros(n, np.float32)) for m, n in sizes]


def _loss(params: Any, x: Any, y: Any) -> Any:
    *hidden, (w, b) = params
    for wh, bh in hidden:
        x = jnp.tanh(x @ wh + bh)
    return jnp.mean((x @ w + b - y) ** 2)


def step_on_one_chip(params: Any, batch: Any) -> Any:
    """Gradient descent on the whole batch."""
    loss, grads = jax.value_and_grad(_loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


def data_parallel_step(chips: int) -> Any:
    """The same with a piece of the batch on each chip."""

    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(jax.tree.map(lambda p: lax.pcast(p, "d", to="varying"), params), *batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * lax.pmean(g, "d"), params, grads)
        return params, {"loss": lax.pmean(loss, "d")}

    return jax.shard_map(step, mesh=mesh_of({"d": chips}), in_specs=(P(), P("d")), out_specs=(P(), P()))


def _batches(count: int) -> list[Any]:
    return [(RNG.normal(size=(BATCH, 16)).astype(np.float32), RNG.normal(size=(BATCH, 4)).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("chips", [2, 8])
def test_a_data_parallel_training_is_that_of_one_chip_with_the_whole_batch_and_all_replicas_are_equal(chips: int) -> None:
    batches, initial = _batches(20), _parameters()
    steps = {"one": tpuflow.jit(step_on_one_chip), "several": tpuflow.jit(data_parallel_step(chips))}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        params = initial
        for batch in batches:
            params, figures = step(params, batch)
            losses[name].append(float(figures["loss"]))
    np.testing.assert_allclose(losses["several"], losses["one"], rtol=1e-6)
    engine = ReferenceEngine(steps["several"].program(initial, batches[0]))
    engine.launch([np.asarray(x) for x in jax.tree.leaves((initial, batches[0]))])
    for number in range(len(engine.program.outputs)):
        first, *others = engine.pieces(number)
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_a_sink_cuts_its_batches_over_the_chips_and_gives_what_single_steps_do() -> None:
    batches, initial = _batches(6), _parameters()
    step, params, losses = tpuflow.jit(data_parallel_step(4)), initial, []
    for batch in batches:
        params, figures = step(params, batch)
        losses.append(np.asarray(figures["loss"]))
    (sunk,) = tpuflow.sink(data_parallel_step(4), batches, -1, state=initial, epochs=1)
    np.testing.assert_array_equal(sunk.metrics["loss"], losses)
    assert jax.tree.all(jax.tree.map(np.array_equal, sunk.state, params))


def sharded_step(chips: int, *, scattered: bool) -> Any:
    """Momentum, [parameter] or whole, for a flat vector of parameters: whole on every chip, or (ZeRO's first stage) each chip's share."""
    unravel = ravel_pytree(_parameters())[1]

    def step(state: Any, batch: Any) -> Any:
        params, momentum = state
        loss, grads = jax.value_and_grad(lambda flat: _loss(unravel(flat), *batch))(params)
        if scattered:
            own = lax.dynamic_slice_in_dim(params, lax.axis_index("d") * momentum.size, momentum.size)
            momentum = 0.9 * momentum + lax.psum_scatter(grads / chips, "d", tiled=True)
            params = lax.all_gather(own - 0.1 * momentum, "d", tiled=True)
        else:
            momentum = 0.9 * momentum + lax.psum(grads / chips, "d")
            params = params - 0.1 * momentum
        return (params, momentum), {"loss": lax.pmean(loss, "d")}

    states = (P(), P("d") if scattered else P())
    return jax.shard_map(step, mesh=mesh_of({"d": chips}), in_specs=(states, P("d")), out_specs=(states, P()), check_vma=False)


def test_an_optimizer_state_in_shares_gives_the_bits_of_a_whole_one_in_a_sink_too() -> None:
    """For a sum is its scattered parts, gathered: what is declared of both is one order."""
    flat, batches = ravel_pytree(_parameters())[0], _batches(5)
    state = (np.asarray(flat), np.zeros(flat.size, np.float32))
    found = {}
    for scattered in (False, True):
        (sunk,) = tpuflow.sink(sharded_step(4, scattered=scattered), batches, -1, state=state, epochs=1, engine="reference")
        found[scattered] = sunk
    np.testing.assert_array_equal(found[True].metrics["loss"], found[False].metrics["loss"])
    assert jax.tree.all(jax.tree.map(np.array_equal, found[True].state, found[False].state))
    program = tpuflow.jit(sharded_step(4, scattered=True)).program(state, batches[0])
    assert [p.shape for p in program.inputs[:2]] == [(flat.size,), (flat.size // 4,)]
    assert time_program(program).sent_bytes == (2 * flat.size * 3 // 4 + 2 * 3 * 1) * 4


def test_train_on_a_mesh_is_that_of_one_chip() -> None:
    """A last batch of 6 samples, which four chips do not divide, is taken whole."""
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(3)])
    data = (RNG.normal(size=(38, 5)).astype(np.float32), np.arange(38) % 3)
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "batch_size": 16, "epochs": 2, "progress": False, "engine": "reference"}
    for policy, bound in (("fp32", 1e-6), ("mixed", 2e-3)):
        one, several = (tpuflow.train(model, data, policy, **options, mesh=mesh) for mesh in (None, {"data": 4}))
        found, expected = ([v for epoch in r.history for v in epoch["losses"]] for r in (several, one))
        np.testing.assert_allclose(found, expected, rtol=bound)
        assert several.executables[0].program.mesh == (MeshAxis("data", 4),)
    assert "on generic, mesh {'data': 4}" in several.report()


def test_dropout_differs_from_chip_to_chip_and_a_mesh_that_does_not_fit_is_refused() -> None:
    """With one and the same sample everywhere, a chip's mask is all that can make its gradient another one."""
    model = nn.Sequential([nn.Dense(64), lambda x: nn.Dropout(0.5, deterministic=False)(x), nn.Dense(3)])
    data = (np.ones((8, 5), np.float32), np.zeros(8, np.int32))
    losses = {}
    for chips in (1, 2, 4):
        result = tpuflow.train(
            model, data, optimizer=optax.sgd(0.0), batch_size=8, progress=False, mesh={"data": chips}, engine="reference"
        )
        losses[chips] = result.history[0]["losses"][0]
    assert len(set(losses.values())) == 3
    for options, refused in (
        ({"mesh": {"data": 3}}, "a batch of 8 samples does not divide over 3 chips"),
        ({"mesh": {"data": 0}}, "expected axes with how many chips they have"),
        ({"mesh": 4}, "expected axes with how many chips they have"),
        ({"mesh": {"data": 2, "model": 2}}, "over one axis"),
        ({"mesh": {"data": 2}, "sharding": "zero3"}, "zero3"),
    ):
        with pytest.raises(ConfigError, match=refused):
            tpuflow.train(model, data, batch_size=8, progress=False, **options)


def test_the_example_of_the_documentation_runs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "meshes.md").read_text()
    names: dict[str, Any] = {}
    exec(compile(text.split("```python\n")[1].split("```")[0], "docs/meshes.md", "exec"), names)
    assert names["y"].shape == (32, 64)
    np.testing.assert_allclose(names["y"], jax.nn.gelu(names["x"] @ names["w1"]) @ names["w2"], rtol=1e-2)


@pytest.mark.parametrize("chips", [2, 4, 8, 64])
def test_a_step_sends_what_the_formula_says_and_hides_what_it_can(chips: int) -> None:
    """2 psi (n - 1) / n for n chips: each parameter's gradient is scattered, summed and gathered."""
    x, y = np.zeros((64, 16), np.float32), np.zeros((64, 4), np.float32)
    program = tpuflow.jit(data_parallel_step(chips), chip="tpu-v5e").program(_parameters(), (x, y))
    time = time_program(program)
    leaves = [p for layer in _parameters() for p in layer] + [np.float32(0)]
    assert time.sent_bytes == sum(2 * (chips - 1) * 4 * -(-leaf.size // chips) for leaf in leaves)
    assert time.link_seconds == pytest.approx(sum(all_reduce_seconds(program.chip, 4 * leaf.size, chips) for leaf in leaves))
    assert 0 < time.exposed_link_seconds < time.link_seconds
    kinds = [type(block) for block in program.code]
    first = kinds.index(Collective)
    assert Kernel in kinds[first : kinds.index(Await)]  # what does not need the sum runs before the wait


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
