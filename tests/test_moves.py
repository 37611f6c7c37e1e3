"""Moves move bits: NaN payloads, signs of zeros and subnormals arrive as they left, on every engine and in every type."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.forging import fed
from tests.moves import MOVES, every_move, random_bits
from tests.program_builder import Builder
from tests.programs import reduce_program
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import BF16, DTYPES, F16, S32, DType
from tpuflow.isa.dma import StoreIndexed
from tpuflow.isa.numpy_arithmetic import is_defined
from tpuflow.isa.program import Infeed, Loop, Outfeed

ENGINES = (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native"))
PLACES = np.int32(2), np.array([4, 0, 9, 2], np.int32)
EVERY = [(d, *how) for d in DTYPES for how in ENGINES if d.is_float or d == S32 or how[1] != "native"]
"""Types that are not floats are translated alike in both fidelities."""
BOOL = np.dtype(bool)


def _word(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype == BOOL else np.dtype(f"u{dtype.itemsize}")


def _expected(move: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """What JAX makes of the same bits as integers."""
    word = _word(x.dtype)
    return [np.asarray(a) for a in jax.tree.leaves(jax.jit(move)(x.view(word), y.view(word), *PLACES))]


def _differing(move: Any, dtype: np.dtype[Any], engine: str, fidelity: str) -> list[int]:
    """Numbers of the results that a bit move would have made otherwise."""
    x, y = random_bits(0, dtype), random_bits(1, dtype)
    program = compile_function(move, (x, y, *PLACES))
    outputs, _ = Executable(program, engine=engine, fidelity=fidelity).launch([x, y, *PLACES])
    pairs = zip(map(np.asarray, outputs), _expected(move, x, y), strict=True)
    return [n for n, (got, wanted) in enumerate(pairs) if got.tobytes() != wanted.tobytes()]


def _names() -> list[str]:
    """The move that each result of `every_move` belongs to."""
    x = np.zeros((6, 8), np.uint8)
    return [name for name in sorted(MOVES) for _ in jax.tree.leaves(jax.eval_shape(MOVES[name], x, x, *PLACES))]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "engine", "fidelity"), EVERY, ids=str)
def test_every_move_keeps_every_bit(dtype: DType, engine: str, fidelity: str) -> None:
    names = _names()
    assert sorted({names[n] for n in _differing(every_move, dtype.numpy, engine, fidelity)}) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", (F16, BF16), ids=str)
def test_a_move_by_itself_keeps_every_bit(dtype: DType, name: str) -> None:
    assert [how for how in ENGINES[1:] if _differing(MOVES[name], dtype.numpy, *how)] == []


@pytest.mark.parametrize(("dtype", "engine", "fidelity"), EVERY, ids=str)
def test_infeeds_and_outfeeds_keep_every_bit(dtype: DType, engine: str, fidelity: str) -> None:
    b = Builder()
    trips = b.constant(np.int32(3))
    port, out = b.infeed("x", dtype, (6, 8)), b.outfeed("y", dtype, (6, 8))
    last = b.new_output("last", dtype, (6, 8))
    program = b.program(Infeed(port, last), Outfeed(out, last), Loop(trips, (Infeed(port, last), Outfeed(out, last))))
    items = np.stack([random_bits(seed, dtype.numpy) for seed in range(4)])
    outputs, sent = Executable(program, engine=engine, fidelity=fidelity).launch([], [items])
    assert np.asarray(outputs[0]).tobytes() == items[-1].tobytes()
    assert np.asarray(sent[0])[:4].tobytes() == items.tobytes()


STORES = {"set": "set", "add": "add", "mul": "multiply", "min": "min", "max": "max"}


def _every_store(modes: list[str]) -> Any:
    """x [6, 8] combined with rows and with single elements of u [9, 8], at places that come twice, lie outside, or never come."""
    rows, columns = np.array([4, 0, 4, 9, 2, -1, 0, 4, 1]), np.array([1, 5, 1, 2, 7, 0, 5, 1, 3])

    def stored(x: Any, u: Any) -> list[Any]:
        whole = [getattr(x.at[rows], STORES[mode])(u, mode="drop", wrap_negative_indices=False) for mode in modes]
        return whole + [getattr(x.at[rows, columns], STORES[mode])(u[:, 0], mode="drop", wrap_negative_indices=False) for mode in modes]

    return stored


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexed_stores_of_any_bits_are_the_same_on_both_engines(dtype: DType) -> None:
    modes = [mode for mode in STORES if mode == "set" or is_defined(mode, dtype)]
    function = _every_store(modes)
    x, u = random_bits(0, dtype.numpy), random_bits(9, dtype.numpy, (9, 8))
    program = compile_function(function, (x, u))
    stored = {i.mode for k in program.kernels() for i in k.instructions if isinstance(i, StoreIndexed)}
    assert stored == set(modes)
    for seed in range(10):
        x, u = random_bits(seed, dtype.numpy), random_bits(seed + 10, dtype.numpy, (9, 8))
        results = [Executable(program, engine=engine, fidelity="bitexact").launch([x, u])[0] for engine in ("reference", "fast")]
        pairs = zip(2 * modes, *results, strict=True)
        assert [mode for mode, *both in pairs if len({np.asarray(a).tobytes() for a in both}) > 1] == []


@pytest.mark.parametrize(("engine", "fidelity"), ENGINES)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_float], ids=str)
def test_rows_that_no_indexed_store_names_keep_every_bit(dtype: DType, engine: str, fidelity: str) -> None:
    x, u = random_bits(0, dtype.numpy), random_bits(1, dtype.numpy, (9, 8))
    outputs, _ = Executable(compile_function(_every_store(list(STORES)), (x, u)), engine=engine, fidelity=fidelity).launch([x, u])
    assert {np.asarray(y)[[3, 5]].tobytes() for y in outputs} == {x[[3, 5]].tobytes()}


@pytest.mark.parametrize(("dtype", "engine", "fidelity"), EVERY, ids=str)
def test_constants_keep_every_bit(dtype: DType, engine: str, fidelity: str) -> None:
    table = random_bits(5, dtype.numpy)
    program = compile_function(lambda i: (jnp.asarray(table)[i], jnp.asarray(table).T), (np.int32(3),))
    outputs, _ = Executable(program, engine=engine, fidelity=fidelity).launch([np.int32(3)])
    assert [np.asarray(x).tobytes() for x in outputs] == [table[3].tobytes(), table.T.tobytes()]


@pytest.mark.parametrize("op", ["add", "mul", "max"])
@pytest.mark.parametrize("dtype", (F16, BF16), ids=str)
def test_accumulators_that_lie_in_16_bits_between_trips_are_the_same_on_both_engines(dtype: DType, op: str) -> None:
    program = fed(reduce_program(op=op, dtype=dtype), np.random.default_rng(8))
    assert program.infeeds and len(program.code) > 1
    items = np.random.default_rng(0).standard_normal((4, 20, 300)).astype(dtype.numpy)
    runs = [Executable(program, engine=engine, fidelity="bitexact").launch([np.int32(3)], [items]) for engine in ("reference", "fast")]
    (ours, sent), (theirs, received) = runs
    assert np.asarray(ours[0]).tobytes() == np.asarray(theirs[0]).tobytes()
    assert np.asarray(sent[0])[:3].tobytes() == np.asarray(received[0])[:3].tobytes()
