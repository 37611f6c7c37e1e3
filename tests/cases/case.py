"""What a row of the table of operation cases is: a function, its arguments, whether it has a gradient, how closely it must be met."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.quick import QUICK

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16)
S32, U32, BOOL = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.bool_)
FLOATS = (F32, F16, BF16)

# Relative and absolute error allowed against jax.jit, by class and element type.
TOLERANCES: dict[str, dict[np.dtype, tuple[float, float]]] = {
    # moves, bits, integers, comparisons, and float operations that IEEE rounds correctly: nothing may differ
    "exact": {F32: (0.0, 0.0), F16: (0.0, 0.0), BF16: (0.0, 0.0)},
    # one special function: XLA:CPU errs by up to 5 units in the last place in f32, by one in the narrow types
    "function": {F32: (3e-6, 1e-6), F16: (2e-3, 1e-4), BF16: (1.6e-2, 1e-3)},
    # several special functions and cancelling differences on either side, and gradients through them
    "composed": {F32: (1e-4, 1e-5), F16: (1.5e-2, 4e-3), BF16: (8e-2, 3e-2)},
    # sums of up to a few hundred products: the order of additions differs
    "sum": {F32: (2e-5, 2e-5), F16: (4e-3, 4e-3), BF16: (3e-2, 3e-2)},
    # the same where XLA:CPU keeps the running sum in the narrow type (ours is kept in f32)
    "long_sum": {F32: (2e-5, 2e-5), F16: (2e-2, 6e-2), BF16: (1e-1, 5e-1)},
}


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument to be made: shape, element type, and the values it is drawn from (see `_DOMAINS`)."""

    shape: tuple[int, ...] = ()
    dtype: Any = F32
    domain: str = "normal"
    high: int = 0

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """The array, of a deterministic stream."""
        return np.asarray(_DOMAINS[self.domain](rng, self)).astype(self.dtype).reshape(self.shape)


def _normal(rng: np.random.Generator, arg: Arg) -> Any:
    kind = np.dtype(arg.dtype).kind
    if kind == "b":
        return rng.random(arg.shape) < 0.5
    return rng.integers(-50 if kind == "i" else 0, 51, arg.shape) if kind in "iu" else rng.standard_normal(arg.shape)


def _bits(rng: np.random.Generator, arg: Arg) -> Any:
    raw = rng.integers(0, 256, (max(1, int(np.prod(arg.shape))), np.dtype(arg.dtype).itemsize), dtype=np.uint8)
    return raw.view(arg.dtype)[: int(np.prod(arg.shape))]


def _ties(rng: np.random.Generator, arg: Arg) -> Any:
    return rng.integers(-3, 4, arg.shape) / 2


def _edges(rng: np.random.Generator, arg: Arg) -> Any:
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 2.5, -2.5, 1e-4, 100.0]
    return np.resize(special, arg.shape)


def _definite(rng: np.random.Generator, arg: Arg) -> Any:
    x = rng.standard_normal(arg.shape)
    return x @ np.swapaxes(x, -1, -2) / arg.shape[-1] + np.eye(arg.shape[-1])


def _key(rng: np.random.Generator, arg: Arg) -> Any:
    return rng.integers(0, 1 << 32, arg.shape, dtype=np.uint32)


_DOMAINS: dict[str, Callable[[np.random.Generator, Arg], Any]] = {
    "normal": _normal,  # standard normal; integers -50..50, unsigned 0..50; fair coins
    "positive": lambda rng, a: rng.uniform(0.1, 3.0, a.shape),
    "above_one": lambda rng, a: rng.uniform(1.1, 5.0, a.shape),
    "unit": lambda rng, a: rng.uniform(-0.95, 0.95, a.shape),
    "wide": lambda rng, a: rng.standard_normal(a.shape) * 6,
    "nonzero": lambda rng, a: rng.integers(1, 12, a.shape) * rng.choice([-1, 1], a.shape),
    "count": lambda rng, a: rng.integers(0, a.high, a.shape),  # 0 .. high - 1
    "index": lambda rng, a: rng.integers(-2, a.high + 2, a.shape),  # some out of range
    "ties": _ties,  # halves, many equal
    "edges": _edges,  # zeros of both signs, infinities, NaN, halves
    "bits": _bits,  # any bit pattern
    "key": _key,
    "definite": _definite,  # symmetric matrices, eigenvalues from 1 to about 5
    "distinct": lambda rng, a: rng.permutation(int(np.prod(a.shape))).reshape(a.shape) / 8 - 3,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `fn` on `args`, judged against jax.jit within the tolerance class; `grad`: its gradient is judged too.

    platform: for which JAX lowers it to the StableHLO that is judged.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Arg, ...]
    grad: bool = False
    tolerance: str = "function"
    platform: str = "cpu"

    def arguments(self) -> tuple[np.ndarray, ...]:
        """The arrays, the same in every process."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return tuple(a.make(rng) for a in self.args)

    def gradient(self) -> Case:
        """The case of the derivatives with respect to all floating arguments, under fixed uneven cotangents."""
        floats = tuple(i for i, a in enumerate(self.args) if np.dtype(a.dtype).kind not in "iub")
        # the closeness of f does not bound that of its derivative: another class of error
        tolerance = "sum" if self.tolerance in ("exact", "sum") else "composed"
        return replace(self, name=f"grad-{self.name}", fn=_Gradient(self.fn, floats), grad=False, tolerance=tolerance)

    def expected(self) -> list[np.ndarray]:
        """What jax.jit gives; computed once a process."""
        return _expected(self)

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise AssertionError unless the outputs are jax.jit's within the tolerance."""
        expected = self.expected()
        assert len(outputs) == len(expected), f"{self.name}: {len(outputs)} outputs, {len(expected)} expected"
        for i, (got, want) in enumerate(zip(outputs, expected, strict=True)):
            assert_close(np.asarray(got), want, self.tolerance, f"{self.name}, output {i}")


@functools.cache
def _expected(case: Case) -> list[np.ndarray]:
    arguments = case.arguments()
    compiled = jax.jit(case.fn).lower(*arguments).compile(compiler_options=QUICK)
    return [np.asarray(x) for x in jax.tree.leaves(compiled(*arguments))]


@dataclass(frozen=True)  # no slots: jax keeps weak references to the functions it traces
class _Gradient:
    """Derivative of sum(fn(...) * cos(1, 2, 3, ...)) with respect to the arguments numbered in `floats`."""

    fn: Callable[..., Any]
    floats: tuple[int, ...]

    def __call__(self, *args: Any) -> Any:
        return jax.grad(self._loss, argnums=self.floats)(*args)

    def _loss(self, *args: Any) -> Any:
        outputs = [x for x in jax.tree.leaves(self.fn(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x.astype(jnp.float32) * np.cos(np.arange(1.0, x.size + 1)).astype(np.float32).reshape(x.shape)) for x in outputs)


def words(x: Any) -> np.ndarray:
    """An array, or the words of random keys."""
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: str, where: str) -> None:
    """Element types and shapes equal; values within the class's tolerance, NaN and infinities in the same places."""
    assert got.dtype == want.dtype and got.shape == want.shape, f"{where}: {got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
    relative, absolute = TOLERANCES[tolerance].get(want.dtype, (0.0, 0.0))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), relative, absolute, err_msg=where)


def over_dtypes(
    name: str, fn: Callable[..., Any], *args: Arg, dtypes: Sequence[np.dtype] = FLOATS, grad: bool = False, tolerance: str = "function"
) -> list[Case]:
    """One row for each element type; it replaces the type of every argument that has the default one."""
    rows = []
    for dtype in dtypes:
        typed = tuple(replace(a, dtype=dtype) if a.dtype is F32 else a for a in args)
        rows.append(Case(f"{name}-{dtype.name}", fn, typed, grad and dtype.kind not in "iub", tolerance))
    return rows
