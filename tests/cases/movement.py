"""Cases of primitives that make and move arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.cases.case import BF16, BOOL, F16, F32, S32, U32, Arg, Case

_ALL = (F32, F16, BF16, S32, BOOL)


def _move(name: str, fn: Callable[..., Any], *args: Arg, grad: bool = True) -> Case:
    return Case(name, fn, args, grad, "exact")


def _rows(name: str, fn: Callable[..., Any], shape: tuple[int, ...]) -> list[Case]:
    return [_move(f"{name}-{d.name}", fn, Arg(shape, d), grad=d in (F32, F16)) for d in _ALL]


CASES = [
    *_rows("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (7, 9, 11)),
    *_rows("reverse", lambda x: lax.rev(x, (0, 1)), (130, 257)),
    *_rows("slice-strided", lambda x: lax.slice(x, (3, 1), (129, 250), (2, 3)), (130, 257)),
    *_rows("pad", lambda x: lax.pad(x, np.array(1, x.dtype), ((1, 2, 0), (3, 0, 2))), (13, 7)),
    *_rows("concatenate", lambda x: lax.concatenate([x, x[:3], x[2:]], 0), (9, 130)),
    *_rows("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (5, 33, 3), (1,)), (33,)),
    *_rows("reshape", lambda x: x.reshape(11, 63), (7, 9, 11)),
    *_rows("dynamic_slice", lambda x: lax.dynamic_slice(x, (jnp.argmax(x[:, 0]), 200), (4, 100)), (130, 257)),
    _move("transpose-2d", lambda x: x.T, Arg((130, 257))),
    _move("transpose-6d", lambda x: jnp.transpose(x, (5, 3, 1, 0, 2, 4)), Arg((2, 3, 4, 3, 2, 5))),
    _move("reshape-with-order", lambda x: lax.reshape(x, (11, 63), (2, 0, 1)), Arg((7, 9, 11))),
    _move("reshape-scalar", lambda x: x.reshape(1, 1), Arg()),
    _move("squeeze", lambda x: lax.squeeze(x, (0, 2)), Arg((1, 33, 1, 5))),
    _move("expand_dims", lambda x: lax.expand_dims(x, (0, 2)), Arg((33, 5))),
    _move("broadcast-scalar", lambda x: jnp.broadcast_to(x, (130, 257)), Arg()),
    _move("broadcast-stretch", lambda x: jnp.broadcast_to(x, (4, 33, 9)), Arg((4, 1, 9))),
    _move("broadcast-transposing", lambda x: jnp.broadcast_to(x.T[:, None], (9, 3, 33)), Arg((33, 9))),
    _move("pad-negative", lambda x: lax.pad(x, 0.0, ((-2, 3, 0), (2, -1, 1))), Arg((13, 7))),
    _move("pad-scalar-operand", lambda x, v: lax.pad(x, v, ((2, 2, 0),)), Arg((5,)), Arg()),
    _move("pad-empty", lambda x: lax.pad(x, 2.0, ((2, 3, 0),)), Arg((0,))),
    _move("slice-to-nothing", lambda x: x[3:3], Arg((9, 5))),
    _move("concatenate-with-empty", lambda x, y: jnp.concatenate([x, y, x], 1), Arg((9, 5)), Arg((9, 0))),
    _move("concatenate-last-axis", lambda x, y: jnp.concatenate([x, y], -1), Arg((13, 130)), Arg((13, 7))),
    _move("stack", lambda x, y: jnp.stack([x, y], 1), Arg((13, 7)), Arg((13, 7))),
    _move("unstack", lambda x: jnp.unstack(x, axis=1), Arg((13, 3))),
    _move("split", lambda x: jnp.split(x, [3, 10], 1), Arg((7, 19))),
    _move("split-uneven", lambda x: lax.split(x, (1, 4, 2), 0), Arg((7, 19))),
    _move("iota", lambda x: x + lax.broadcasted_iota(np.int32, (7, 130), 1), Arg((7, 130), S32), grad=False),
    _move("iota-f16", lambda: lax.broadcasted_iota(np.float16, (7, 33), 0), grad=False),
    _move("arange-and-eye", lambda: (jnp.arange(3, 40, 4), jnp.eye(9, 7, 1), jnp.tri(6), jnp.linspace(0, 1, 9)), grad=False),
    _move("constant-array", lambda x: x * np.arange(33, dtype=np.float32), Arg((33,))),
    _move(
        "constant-array-bf16",
        lambda x: jnp.where(x > 0, np.array([1.5, -0.0, np.inf, np.nan, 3e-39]).astype(jnp.bfloat16), x),
        Arg((5,), BF16),
        grad=False,
    ),
    _move("constant-output", lambda: (jnp.zeros((3, 5)), jnp.ones((), np.int32), np.arange(4, dtype=np.int32)), grad=False),
    _move("unused-and-passed-through", lambda x, y: (y, y), Arg((5,)), Arg((3,))),
    _move("tile-and-repeat", lambda x: (jnp.tile(x, (2, 3)), jnp.repeat(x, 3, 0)), Arg((5, 7))),
    _move("roll", lambda x: jnp.roll(x, (3, -2), (0, 1)), Arg((13, 7))),
    _move("tril", lambda x: jnp.tril(x, 1), Arg((13, 17))),
    _move("diagonal", lambda x: (jnp.diagonal(x), jnp.diag(x[0])), Arg((9, 9))),
    _move("dynamic_slice-clamps", lambda x, i: lax.dynamic_slice(x, (i, i), (4, 5)), Arg((9, 7)), Arg((), S32, "index", 12)),
    _move("dynamic_slice-unsigned", lambda x, i: lax.dynamic_slice(x, (i,), (4,)), Arg((9,)), Arg((), U32, "bits"), grad=False),
    _move("dynamic_slice-int8", lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), Arg((9, 130)), Arg((), np.dtype(np.int8))),
    _move("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 100)), Arg((130, 257)), Arg((7, 33)), Arg((), S32)),
    _move("dynamic_update_slice-whole", lambda x, u: lax.dynamic_update_slice(x, u, (0,)), Arg((9,)), Arg((9,))),
    Case(
        "moves-into-work",
        lambda x: jnp.exp(jnp.pad(x[::2, 1:].T, ((0, 0), (2, 2)))[::-1]) + jnp.roll(x, 3, 1)[0, :8, None],
        (Arg((13, 9)),),
        True,
        "function",
    ),
    Case("moves-into-sums", lambda x: jnp.sum(x.reshape(7, 3, 5)[:, ::-1].transpose(1, 0, 2), (1, 2)), (Arg((21, 5)),), True, "sum"),
    _move("identities", lambda x: jax.device_put(lax.optimization_barrier(lax.stop_gradient(x) + jnp.copy(x))), Arg((33,))),
    _move("empty-moves", lambda x: (x.T, x.reshape(5, 0, 2), jnp.flip(x)), Arg((0, 5))),
]
