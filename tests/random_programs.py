"""Random programs for property tests: a list of steps over a pool of arrays, drawn by Hypothesis, runnable as a JAX function.

Every step names an operation of `STEPS`, the pool entries it reads, and static parameters. `evaluate` runs a program with JAX and
returns every array of the pool, so an engine's own intermediate arrays can be judged operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from tests import enumerated
from tests.enumerated import Window

SHAPES = ((), (5,), (3, 5), (5, 3), (2, 3, 5), (130,), (9, 130), (1, 5))
SPECIAL = (np.inf, -np.inf, np.nan, 1e-40, -1e-40, 65504.0, 3e38)
FLOATS = ("float32", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "bool")


@dataclass(frozen=True)
class Aval:
    """Shape and dtype name of one pool entry."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Step:
    """One operation: row of `STEPS`, pool indices read, static parameters."""

    op: str
    args: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RandomProgram:
    """Inputs (avals and the seed of their values) and steps, each adding one array to the pool."""

    inputs: tuple[Aval, ...]
    seed: int
    steps: tuple[Step, ...]

    def arrays(self, special: float = 0.0) -> list[np.ndarray]:
        """The input values: mostly ordinary numbers; a share of `special` infinities, NaN, subnormals and numbers near the largest."""
        rng = np.random.default_rng(self.seed)
        return [_values(a, rng, special) for a in self.inputs]


@dataclass(frozen=True)
class Row:
    """An operation: how to run it, what it may read, and a loose class for comparing with JAX.

    `accepts` sees the avals of its operands; `ulps` is the bound against JAX's own op in units in the last place of the largest
    magnitude that enters its sum (or of the result for elementwise work). `judge` gives the result wanted in JAX's place where JAX makes
    products of padding.
    """

    run: Callable[..., Any]
    arity: int
    accepts: Callable[..., bool]
    ulps: float
    params: Callable[[Any, tuple[Aval, ...]], tuple[Any, ...]] = lambda draw, avals: ()
    judge: Callable[..., np.ndarray] | None = None

    def wanted(self, operands: Sequence[np.ndarray], params: tuple[Any, ...]) -> np.ndarray:
        """The result on operands, by enumeration or by JAX without jit."""
        if self.judge is not None:
            return self.judge(*operands, *params)
        return np.asarray(self.run(*map(jnp.asarray, operands), *params))


def _values(aval: Aval, rng: np.random.Generator, share: float) -> np.ndarray:
    if aval.dtype == "bool":
        return rng.integers(0, 2, aval.shape).astype(bool)
    if aval.dtype == "int32":
        return rng.integers(-9, 10, aval.shape).astype(np.int32)
    x = np.asarray(rng.standard_normal(aval.shape) * 2)
    special = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 3.0])
    x = np.where(rng.random(aval.shape) < 0.1, special[rng.integers(0, len(special), aval.shape)], x)
    x = np.where(rng.random(aval.shape) < share, np.array(SPECIAL)[rng.integers(0, len(SPECIAL), aval.shape)], x)
    return np.asarray(jnp.asarray(x, jnp.float32).astype(aval.dtype))


def _float(*avals: Aval) -> bool:
    return all(a.dtype in FLOATS for a in avals)


def _number(*avals: Aval) -> bool:
    return all(a.dtype != "bool" for a in avals)


def _same(*avals: Aval) -> bool:
    return len(set(avals)) == 1


def _ranked(low: int) -> Callable[[Aval], bool]:
    return lambda a: len(a.shape) >= low


def _axis(draw: Any, avals: tuple[Aval, ...]) -> tuple[int]:
    return (draw(st.integers(0, len(avals[0].shape) - 1)),)


def _draw_slice(draw: Any, avals: tuple[Aval, ...]) -> tuple[Any, ...]:
    spans = []
    for n in avals[0].shape:
        start = draw(st.integers(0, n - 1))
        spans.append((start, draw(st.integers(start + 1, n)), draw(st.integers(1, 2))))
    return tuple(spans)


def _draw_pad(draw: Any, avals: tuple[Aval, ...]) -> tuple[Any, ...]:
    return tuple((draw(st.integers(-1 if n > 2 else 0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 1))) for n in avals[0].shape)


def _slice(x: Any, *spans: tuple[int, int, int]) -> Any:
    return lax.slice(x, [s[0] for s in spans], [s[1] for s in spans], [s[2] for s in spans])


def _pad(x: Any, *config: tuple[int, int, int]) -> Any:
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _cumsum_loop(x: Any, trips: int) -> Any:
    return lax.fori_loop(0, trips, lambda i, c: c * jnp.asarray(0.5, c.dtype) + x, x)


def _scan_rows(x: Any) -> Any:
    carry = jnp.zeros(x.shape[1:], x.dtype)
    return lax.scan(lambda c, row: (jnp.maximum(c, row), c + row), carry, x)[1]


def _branch(x: Any, y: Any) -> Any:
    return lax.cond(jnp.sum(x > 0) > x.size // 2, lambda a, b: a + b, lambda a, b: a - b, x, y)


def _halve_until_small(x: Any) -> Any:
    small = jnp.asarray(1, x.dtype)
    return lax.while_loop(lambda c: (jnp.max(jnp.abs(c)) > small) & jnp.all(jnp.isfinite(c)), lambda c: c * jnp.asarray(0.5, c.dtype), x)


def _indices(x: Any, n: int) -> Any:
    return jnp.clip(jnp.ravel(x)[:4], 0, n - 1).astype(jnp.int32)


def _images(*avals: Aval) -> bool:
    """Whether the first are images [N, W, C], and the others alike, so that a kernel [W, C, N] can be made of them."""
    return _float(*avals) and _same(*avals) and len(avals[0].shape) == 3 and avals[0].shape[1] < 10


def _draw_window(draw: Any, avals: tuple[Aval, ...]) -> tuple[Window]:
    size = avals[0].shape[1]
    spread, dilation, low, high = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(-1, 3)), draw(st.integers(0, 3))
    fits = max(0, (size - 1) * dilation + 1 - (size - 1) * spread - 1 - low - high)
    return (Window((size,), (draw(st.integers(1, 3)),), ((low + fits, high),), (spread,), (dilation,)),)


def _kernel(y: Any) -> Any:
    return y.transpose(1, 2, 0)


def _convolution(x: Any, y: Any, window: Window) -> Any:
    return window.convolution(x, _kernel(y))


def _cotangent(window: Window, x: Any, w: Any) -> np.ndarray:
    """As many numbers of the images as the result has, over and over."""
    shape = (x.shape[0], *window.outputs(x.shape[1:-1]), w.shape[-1])
    return np.resize(np.asarray(x).astype(np.float32), shape)


def _derived(x: Any, y: Any, window: Window) -> tuple[Any, Any]:
    wide, w = x.astype(jnp.float32), _kernel(y).astype(jnp.float32)
    shape = (x.shape[0], *window.outputs(x.shape[1:-1]), w.shape[-1])
    return enumerated.jax_gradients(window, wide, w, jnp.resize(wide, shape))


def _enumerated(function: Callable[[Window, np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """A judge of the operands of `_convolution`."""
    return lambda x, y, window: function(window, x, _kernel(y)).astype(np.float32)


def _draw_pooling(draw: Any, avals: tuple[Aval, ...]) -> tuple[Window, str]:
    window = Window((draw(st.integers(1, 3)),), (draw(st.integers(1, 3)),), ((0, draw(st.integers(0, 2))),), (1,), (1,))
    return window, draw(st.sampled_from(("max", "min", "add")))


def _pool_gradient(x: Any, window: Window, op: str) -> Any:
    """Of images without NaN, of which it is not said which element of a window wins."""
    x = jnp.nan_to_num(x, nan=1.0, posinf=jnp.inf, neginf=-jnp.inf)
    pooled, derive = jax.vjp(lambda x: window.pooling(x, op), x)
    return derive(jnp.resize(x, pooled.shape))[0]


def _anywhere(x: Any) -> Any:
    """Indices of which many are out of range."""
    return jnp.ravel(x)[:4].astype(jnp.int32)


STEPS: dict[str, Row] = {
    **{
        name: Row(fn, 1, _float, ulps)
        for name, fn, ulps in (
            ("exp", jnp.exp, 8),
            ("tanh", jnp.tanh, 8),
            ("sin", jnp.sin, 8),
            ("cos", jnp.cos, 8),
            ("erf", lax.erf, 16),
            ("log1p_abs", lambda x: jnp.log1p(jnp.abs(x)), 8),
            ("sqrt_abs", lambda x: jnp.sqrt(jnp.abs(x)), 1),
            ("logistic", lax.logistic, 8),
            ("expm1", jnp.expm1, 8),
            ("floor", jnp.floor, 0),
            ("round", jnp.round, 0),
        )
    },
    **{
        name: Row(fn, 1, _number, 0)
        for name, fn in (
            ("neg", jnp.negative),
            ("abs", jnp.abs),
            ("sign", jnp.sign),
            ("square", jnp.square),
            ("relu", lambda x: jnp.maximum(x, 0)),
        )
    },
    **{
        name: Row(fn, 2, lambda a, b: _same(a, b) and _number(a), 0)
        for name, fn in (("add", jnp.add), ("sub", jnp.subtract), ("mul", jnp.multiply), ("max", jnp.maximum), ("min", jnp.minimum))
    },
    "div": Row(jnp.divide, 2, lambda a, b: _same(a, b) and _float(a), 0),
    "not": Row(jnp.logical_not, 1, lambda a: a.dtype == "bool", 0),
    "and": Row(jnp.logical_and, 2, lambda a, b: _same(a, b) and a.dtype == "bool", 0),
    "less": Row(jnp.less, 2, lambda a, b: _same(a, b) and _number(a), 0),
    "where": Row(jnp.where, 3, lambda p, a, b: p.dtype == "bool" and _same(a, b) and p.shape == a.shape, 0),
    "clamp": Row(lambda x: jnp.clip(x, -1, 2), 1, _number, 0),
    "convert": Row(lambda x, d: x.astype(d), 1, lambda a: True, 0, lambda draw, avals: (draw(st.sampled_from(DTYPES)),)),
    "sum": Row(lambda x, a: jnp.sum(x, a), 1, lambda a: _float(a) and len(a.shape) >= 1, 64, _axis),
    "max_reduce": Row(lambda x, a: jnp.max(x, a), 1, lambda a: _number(a) and len(a.shape) >= 1, 0, _axis),
    "sum_all": Row(lambda x: jnp.sum(x), 1, _float, 256),
    "argmax": Row(lambda x, a: jnp.argmax(x, a).astype(jnp.int32), 1, lambda a: _number(a) and len(a.shape) >= 1, 0, _axis),
    "min_reduce": Row(lambda x, a: jnp.min(x, a), 1, lambda a: _number(a) and len(a.shape) >= 1, 0, _axis),
    "any": Row(lambda x, a: jnp.any(x, a), 1, lambda a: a.dtype == "bool" and len(a.shape) >= 1, 0, _axis),
    "cumsum": Row(lambda x, a: jnp.cumsum(x, a), 1, lambda a: _float(a) and len(a.shape) >= 1, 64, _axis),
    "cummax": Row(lambda x, a: lax.cummax(x, a), 1, lambda a: _number(a) and len(a.shape) >= 1, 0, _axis),
    "sort": Row(lambda x, a: jnp.sort(x, a), 1, lambda a: _number(a) and len(a.shape) >= 1, 0, _axis),
    "transpose": Row(jnp.transpose, 1, _ranked(2), 0),
    "flatten": Row(jnp.ravel, 1, _ranked(1), 0),
    "reverse": Row(lambda x, a: jnp.flip(x, a), 1, _ranked(1), 0, _axis),
    "slice": Row(_slice, 1, _ranked(1), 0, _draw_slice),
    "pad": Row(_pad, 1, _ranked(1), 0, _draw_pad),
    "concatenate": Row(lambda x, y, a: jnp.concatenate([x, y], a), 2, lambda a, b: _same(a, b) and len(a.shape) >= 1, 0, _axis),
    "broadcast": Row(
        lambda x, n: jnp.broadcast_to(x, (n, *x.shape)), 1, lambda a: len(a.shape) < 3, 0, lambda draw, avals: (draw(st.integers(1, 3)),)
    ),
    "outer": Row(
        lambda x, y: x[:, None] * y[None, :], 2, lambda a, b: a.dtype == b.dtype and _float(a, b) and len(a.shape) == len(b.shape) == 1, 0
    ),
    "matmul": Row(
        lambda x, y: x @ y,
        2,
        lambda a, b: _float(a) and a.dtype == b.dtype and len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0],
        64,
    ),
    "conv": Row(_convolution, 2, lambda a, b: _images(a, b), 64, _draw_window, _enumerated(enumerated.convolution)),
    **{
        f"conv_{operand}_gradient": Row(
            lambda x, y, window, i=i: _derived(x, y, window)[i],
            2,
            _images,
            64,
            _draw_window,
            _enumerated(lambda window, x, w, i=i: enumerated.gradients(window, x, w, _cotangent(window, x, w))[i]),
        )
        for i, operand in enumerate(("images", "kernel"))
    },
    "pool": Row(
        lambda x, window, op: window.pooling(x, op),
        1,
        lambda a: _images(a, a),
        64,
        lambda draw, avals: (*_draw_window(draw, avals), draw(st.sampled_from(("max", "min", "add")))),
    ),
    "pool_gradient": Row(_pool_gradient, 1, lambda a: _images(a, a), 64, _draw_pooling),
    "take": Row(
        lambda x, i: jnp.take(x, _indices(i, x.shape[0]), axis=0),
        2,
        lambda a, i: len(a.shape) >= 1 and i.dtype == "int32" and len(i.shape) >= 1,
        0,
    ),
    "scatter_add": Row(
        lambda x, i: x.at[_indices(i, x.shape[0])].add(jnp.ones((), x.dtype)),
        2,
        lambda a, i: _number(a) and len(a.shape) >= 1 and i.dtype == "int32" and len(i.shape) >= 1,
        8,
    ),
    **{
        f"scatter_{op}": Row(
            lambda x, i, op=op: getattr(x.at[_anywhere(i)], op)(jnp.full((), 2, x.dtype), mode="drop"),
            2,
            lambda a, i: _number(a) and len(a.shape) >= 1 and i.dtype == "int32" and len(i.shape) >= 1,
            8,
        )
        for op in ("set", "multiply", "min", "max")
    },
    "take_fill": Row(
        lambda x, i: jnp.take(x, _anywhere(i), axis=0, mode="fill"),
        2,
        lambda a, i: len(a.shape) >= 1 and i.dtype == "int32" and len(i.shape) >= 1,
        0,
    ),
    "loop": Row(_cumsum_loop, 1, _float, 16, lambda draw, avals: (draw(st.integers(0, 3)),)),
    "scan": Row(_scan_rows, 1, lambda a: _number(a) and len(a.shape) >= 2, 2),
    "cond": Row(_branch, 2, lambda a, b: _same(a, b) and _number(a), 0),
    "while": Row(_halve_until_small, 1, _float, 0),
}


@st.composite
def random_programs(draw: Any, max_steps: int = 30) -> RandomProgram:
    """Programs of 1 to `max_steps` steps over 2 to 4 inputs of mixed shapes and dtypes."""
    inputs = [Aval(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))) for _ in range(draw(st.integers(1, 3)))]
    inputs.append(Aval(draw(st.sampled_from(SHAPES[1:])), "float32"))
    pool, steps = list(inputs), []
    for _ in range(draw(st.integers(1, max_steps))):
        step = _draw_step(draw, pool)
        if step is None:
            continue
        pool.append(_aval_of(step, pool))
        steps.append(step)
    return RandomProgram(tuple(inputs), draw(st.integers(0, 2**16)), tuple(steps))


def _draw_step(draw: Any, pool: list[Aval]) -> Step | None:
    name = draw(st.sampled_from(sorted(STEPS)))
    row = STEPS[name]
    args: list[int] = []
    for position in range(row.arity):
        fitting = [i for i in range(len(pool)) if pool[i].shape.count(0) == 0 and _fits(row, [*args, i], pool, position)]
        if not fitting:
            return None
        args.append(draw(st.sampled_from(fitting)))
    avals = tuple(pool[i] for i in args)
    step = Step(name, tuple(args), row.params(draw, avals))
    size = int(np.prod(_aval_of(step, pool).shape))
    return step if 0 < size <= 4000 else None


def _fits(row: Row, args: list[int], pool: list[Aval], position: int) -> bool:
    if position + 1 == row.arity:
        return row.accepts(*(pool[i] for i in args))
    rest = row.arity - position - 1
    return any(row.accepts(*(pool[i] for i in args), *more) for more in _fillers(pool, rest))


def _fillers(pool: list[Aval], count: int) -> list[tuple[Aval, ...]]:
    unique = sorted(set(pool), key=str)
    return [(a,) * count for a in unique] if count < 2 else [(a, b) for a in unique for b in unique]


def _aval_of(step: Step, pool: list[Aval]) -> Aval:
    args = [jax.ShapeDtypeStruct(pool[i].shape, pool[i].dtype) for i in step.args]
    out = jax.eval_shape(lambda *xs: STEPS[step.op].run(*xs, *step.params), *args)
    return Aval(tuple(out.shape), str(out.dtype))


def evaluate(program: RandomProgram, *inputs: Any) -> list[Any]:
    """Every array of the pool after the inputs, in step order."""
    pool = list(inputs)
    for step in program.steps:
        pool.append(STEPS[step.op].run(*(pool[i] for i in step.args), *step.params))
    return pool[len(inputs) :]
