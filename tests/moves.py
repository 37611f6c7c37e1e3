"""Moves of arrays: operations that change where elements lie and never what they are, on any type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.dtypes import from_numpy

Move = Callable[..., Any]
"""(x [6, 8], y [6, 8], i s32[], rows s32[4]) -> the moved arrays; i is 2, rows are places of axis 0, one of them outside."""


def _picked(x: Any, y: Any, i: Any, rows: Any) -> Any:
    return jnp.where(jnp.arange(8) % 3 == i, x, y)


def _looped(x: Any, y: Any, i: Any, rows: Any) -> Any:
    return lax.fori_loop(0, i + 1, lambda _, c: (c[1], c[0][::-1]), (x, y))


def _scanned(x: Any, y: Any, i: Any, rows: Any) -> Any:
    return lax.scan(lambda c, row: (row, c), x[0], y)


def _counted(x: Any, y: Any, i: Any, rows: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[2], c[1].T.reshape(6, 8)), (i, x, y))[1:]


def _sorted_payload(x: Any, y: Any, i: Any, rows: Any) -> Any:
    keys = (jnp.arange(48) * 7 % 48).reshape(6, 8)
    return lax.sort((keys, x, y), dimension=1, num_keys=1)[1:]


MOVES: dict[str, Move] = {
    "copy": lambda x, y, i, rows: (x, jnp.copy(y)),
    "slice": lambda x, y, i, rows: x[1:5, 2:7],
    "strided slice": lambda x, y, i, rows: x[::2, 1::3],
    "dynamic slice": lambda x, y, i, rows: lax.dynamic_slice(x, (i, i + 5), (3, 4)),
    "dynamic index": lambda x, y, i, rows: lax.dynamic_index_in_dim(x, i, 0, keepdims=False),
    "dynamic update slice": lambda x, y, i, rows: lax.dynamic_update_slice(x, y[:3, :4], (i, i)),
    "concatenate rows": lambda x, y, i, rows: jnp.concatenate([x, y, x[:2]], 0),
    "concatenate columns": lambda x, y, i, rows: jnp.concatenate([x, y], 1),
    "stack": lambda x, y, i, rows: jnp.stack([x, y], 2),
    "split": lambda x, y, i, rows: jnp.split(x, [1, 3], 0),
    "pad": lambda x, y, i, rows: lax.pad(x, y[0, 0], ((1, 2, 0), (0, 3, 0))),
    "pad inside": lambda x, y, i, rows: lax.pad(x, y[0, 1], ((0, 0, 1), (-1, 2, 2))),
    "transpose": lambda x, y, i, rows: x.T,
    "reverse": lambda x, y, i, rows: (x[::-1], y[:, ::-1]),
    "reshape": lambda x, y, i, rows: x.reshape(4, 12),
    "reshape and transpose": lambda x, y, i, rows: x.reshape(2, 3, 8).transpose(2, 0, 1),
    "broadcast": lambda x, y, i, rows: jnp.broadcast_to(x[:, None, :], (6, 3, 8)),
    "broadcast a number": lambda x, y, i, rows: jnp.broadcast_to(x[0, 0], (5, 7)),
    "repeat and tile": lambda x, y, i, rows: (jnp.repeat(x, 3, 0), jnp.tile(y, (1, 2))),
    "roll": lambda x, y, i, rows: (jnp.roll(x, 3, 1), jnp.roll(y, i, 0)),
    "gather rows": lambda x, y, i, rows: jnp.take(x, rows, 0, mode="clip"),
    "gather columns": lambda x, y, i, rows: jnp.take(x, rows, 1, mode="clip"),
    "gather points": lambda x, y, i, rows: jnp.take_along_axis(x, jnp.broadcast_to(rows, (6, 4)), 1, mode="clip"),
    "scatter set": lambda x, y, i, rows: x.at[rows].set(y[:4], mode="drop"),
    "scatter points": lambda x, y, i, rows: x.at[rows, rows].set(y[0, :4], mode="drop"),
    "slice set": lambda x, y, i, rows: x.at[1:6:2, 3].set(y[:3, 0]),
    "select": _picked,
    "select by predicate": lambda x, y, i, rows: lax.select(i > 1, x, y),
    "triangle": lambda x, y, i, rows: jnp.where(jnp.tri(6, 8, dtype=bool), x, y[0, 0]),
    "diagonal": lambda x, y, i, rows: jnp.diagonal(x),
    "counted loop": _looped,
    "scan": _scanned,
    "while loop": _counted,
    "conditional": lambda x, y, i, rows: lax.cond(i > 1, lambda a, b: (b, a), lambda a, b: (a, b), x, y),
    "switch": lambda x, y, i, rows: lax.switch(i, [lambda a, b: a, lambda a, b: b, lambda a, b: a[::-1]], x, y),
    "sort payload": _sorted_payload,
    "vmapped slice": lambda x, y, i, rows: jax.vmap(lambda r, k: lax.dynamic_slice(r, (k,), (3,)))(x[:4], rows),
}


def every_move(x: Any, y: Any, i: Any, rows: Any) -> dict[str, Any]:
    """All of them, by name."""
    return {name: move(x, y, i, rows) for name, move in MOVES.items()}


def random_bits(seed: int, dtype: np.dtype[Any], shape: tuple[int, ...] = (6, 8)) -> np.ndarray:
    """Elements of any bits at all; of floats, a third are NaN with random payloads (quiet and signalling, of both signs), and
    infinities, zeros and subnormals of both signs are among the rest."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    word = np.dtype(f"u{dtype.itemsize}")
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, dtype=np.uint64).astype(word)
    width = from_numpy(dtype).bits
    if width < 8:
        return (bits & word.type((1 << width) - 1)).view(dtype)
    if dtype.kind not in "iu":
        infinity = np.asarray(np.inf, dtype).view(word)
        sign = word.type(1 << (8 * dtype.itemsize - 1))
        kind = rng.integers(0, 9, shape)
        payload = bits & (word.type(~infinity) & ~sign)
        special = [bits | infinity, payload | infinity | word.type(1), (bits & sign) | infinity | payload & word.type(3) | word.type(1)]
        special += [bits & sign | infinity, bits & sign, payload | bits & sign]
        bits = np.choose(kind, [*special, bits, bits, bits])
    return bits.astype(word).view(dtype)
