"""HBM bytes of single operations beside XLA:TPU's: `python -m bench.xla_operations` writes a section of docs/xla_tpu.md.

First our bytes are compared with those of the arguments and results: XLA:TPU moves no fewer of an operation that needs all of them. It
compiles, with `--compile`, those that need less than their arguments, and those that are beyond the limit so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.kept_rows import Figures, Rows, kept, make, options, wanted
from bench.recorded import table
from bench.sections import put_section
from bench.xla_products import device_of
from bench.xla_tpu import CHIPS, OURS, PAGE, THEIRS
from tpuflow.chips import get_chip
from tpuflow.comparing.comparing import vendor_costs
from tpuflow.comparing.vendor import compile_ahead
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program
from tpuflow.errors import ConfigError

RESULTS, TITLE = Path(__file__).parent / "results" / "xla_operations.json", "Single operations"
LIMIT = 2.0
SIDES = (128, 512, 2048)
"""Of square arrays; pictures have as many elements."""
TYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "s32": jnp.int32}
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _square(side: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((side, side), dtype)


def _pictures(side: int, dtype: Any, channels: int = 64) -> jax.ShapeDtypeStruct:
    height = max(4, math.isqrt(side * side // channels // 4))
    return jax.ShapeDtypeStruct((4, height, height, channels), dtype)


def _on_squares(function: Callable[..., Any], count: int = 1) -> Callable[[int, Any], Made]:
    return lambda side, dtype: (function, (_square(side, dtype),) * count)


def _on_pictures(function: Callable[..., Any], *kernel: int, channels: int = 64) -> Callable[[int, Any], Made]:
    def made(side: int, dtype: Any) -> Made:
        x = _pictures(side, dtype, channels)
        return function, (x, *((jax.ShapeDtypeStruct(kernel, dtype),) if kernel else ()))

    return made


def _indexed(function: Callable[..., Any], *, updates: bool = False) -> Callable[[int, Any], Made]:
    """Of rows of a table, a quarter as many as there are."""

    def made(side: int, dtype: Any) -> Made:
        numbers = jax.ShapeDtypeStruct((side // 4,), jnp.int32)
        rows = (jax.ShapeDtypeStruct((side // 4, side), dtype),) if updates else ()
        return function, (_square(side, dtype), numbers, *rows)

    return made


def _labelled(function: Callable[..., Any]) -> Callable[[int, Any], Made]:
    return lambda side, dtype: (function, (_square(side, dtype), jax.ShapeDtypeStruct((side,), jnp.int32)))


def _conv(stride: int = 1, groups: int = 1, dilation: int = 1) -> Callable[..., Any]:
    """dilation: of the pictures, as in the gradient of a convolution with that stride."""
    return partial(
        lax.conv_general_dilated, window_strides=(stride,) * 2, padding="SAME" if dilation == 1 else ((1, 1),) * 2,
        lhs_dilation=(dilation,) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


def _pooled(kind: Any, start: Any, window: int, stride: int) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, np.asarray(start(x.dtype), x.dtype), kind, (1, window, window, 1), (1, stride, stride, 1), "SAME")


def _least(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _zero(_: Any) -> Any:
    return 0


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a sum of squares, so that it depends on what comes out."""
    return jax.grad(lambda *x: jnp.sum(jnp.square(function(*x).astype(jnp.float32))))


ANY: Mapping[str, Callable[[int, Any], Made]] = {
    "add": _on_squares(jnp.add, 2),
    "add a row": lambda side, dtype: (jnp.add, (_square(side, dtype), jax.ShapeDtypeStruct((side,), dtype))),
    "add a column": lambda side, dtype: (jnp.add, (_square(side, dtype), jax.ShapeDtypeStruct((side, 1), dtype))),
    "maximum": _on_squares(jnp.maximum, 2),
    "where": _on_squares(lambda x, y: jnp.where(x > y, x, y), 2),
    "convert to bf16": _on_squares(lambda x: x.astype(jnp.bfloat16) + 1),
    "convert to s8": _on_squares(lambda x: x.astype(jnp.int8)),
    "transpose": _on_squares(jnp.transpose),
    "transpose of heads": lambda side, dtype: (
        lambda x: jnp.transpose(x, (0, 2, 1, 3)), (jax.ShapeDtypeStruct((4, side // 4, side // 64, 64), dtype),)
    ),
    "channels first": _on_pictures(lambda x: jnp.transpose(x, (0, 3, 1, 2))),
    "reverse rows": _on_squares(lambda x: jnp.flip(x, 0)),
    "reverse columns": _on_squares(lambda x: jnp.flip(x, 1)),
    "roll": _on_squares(lambda x: jnp.roll(x, 3, 0)),
    "concatenate": _on_squares(lambda x, y: jnp.concatenate([x, y], 1), 2),
    "pad": _on_squares(lambda x: jnp.pad(x, 1)),
    "tile": _on_squares(lambda x: jnp.tile(x, (2, 1))),
    "broadcast": lambda side, dtype: (lambda x: jnp.broadcast_to(x, (side, side)), (jax.ShapeDtypeStruct((side,), dtype),)),
    "reshape": _on_squares(lambda x: x.reshape(-1, 64) + 1),
    "sum of rows": _on_squares(lambda x: jnp.sum(x, 1)),
    "sum of columns": _on_squares(lambda x: jnp.sum(x, 0)),
    "sum": _on_squares(jnp.sum),
    "maximum of all": _on_squares(jnp.max),
    "argmax of rows": _on_squares(lambda x: jnp.argmax(x, 1)),
    "argmax of columns": _on_squares(lambda x: jnp.argmax(x, 0)),
    "cumulative sum along rows": _on_squares(lambda x: jnp.cumsum(x, 1)),
    "cumulative sum along columns": _on_squares(lambda x: jnp.cumsum(x, 0)),
    "sort rows": _on_squares(lambda x: jnp.sort(x, 1)),
    "sort columns": _on_squares(lambda x: jnp.sort(x, 0)),
    "top 8 of rows": _on_squares(lambda x: lax.top_k(x, 8)),
    "one-hot": lambda side, dtype: (lambda n: jax.nn.one_hot(n, side, dtype=dtype), (jax.ShapeDtypeStruct((side,), jnp.int32),)),
    "lower triangle": _on_squares(jnp.tril),
    "product": _on_squares(lambda x, y: x @ y, 2),
    "product with a vector": lambda side, dtype: (jnp.matmul, (_square(side, dtype), jax.ShapeDtypeStruct((side,), dtype))),
    "max pooling 2 x 2": _on_pictures(_pooled(lax.max, _least, 2, 2)),
    "max pooling 3 x 3 by 2": _on_pictures(_pooled(lax.max, _least, 3, 2)),
    "sum pooling 3 x 3": _on_pictures(_pooled(lax.add, _zero, 3, 1)),
    "strided slice": _on_squares(lambda x: x[::2, ::2]),
    "update of a slice": lambda side, dtype: (
        lambda x, y: lax.dynamic_update_slice(x, y, (3, 0)), (_square(side, dtype), jax.ShapeDtypeStruct((side // 4, side), dtype))
    ),
}  # fmt: skip
"""Of numbers of any type."""
FLOATS: Mapping[str, Callable[[int, Any], Made]] = {
    "exp": _on_squares(jnp.exp),
    "tanh": _on_squares(jnp.tanh),
    "gelu": _on_squares(jax.nn.gelu),
    "softmax of rows": _on_squares(jax.nn.softmax),
    "softmax of columns": _on_squares(lambda x: jax.nn.softmax(x, 0)),
    "gradient of softmax": _on_squares(_backward(jax.nn.softmax)),
    "layer normalisation": _on_squares(jax.nn.standardize),
    "gradient of layer normalisation": _on_squares(_backward(jax.nn.standardize)),
    "batch normalisation": _on_pictures(lambda x: jax.nn.standardize(x, axis=(0, 1, 2))),
    "cross-entropy": _labelled(lambda x, n: -jnp.take_along_axis(jax.nn.log_softmax(x), n[:, None], 1).mean()),
    "convolution 1 x 1": _on_pictures(_conv(), 1, 1, 64, 64),
    "convolution 3 x 3": _on_pictures(_conv(), 3, 3, 64, 64),
    "convolution 3 x 3 by 2": _on_pictures(_conv(2), 3, 3, 64, 64),
    "convolution 3 x 3, dilated": _on_pictures(_conv(dilation=2), 3, 3, 64, 64),
    "convolution 3 x 3, depthwise": _on_pictures(_conv(groups=64), 3, 3, 1, 64),
    "convolution 3 x 3, 8 groups": _on_pictures(_conv(groups=8), 3, 3, 8, 64),
    "gradient of max pooling 2 x 2": _on_pictures(_backward(_pooled(lax.max, _least, 2, 2))),
    "gradient of max pooling 3 x 3 by 2": _on_pictures(_backward(_pooled(lax.max, _least, 3, 2))),
    "gradient of sum pooling 3 x 3": _on_pictures(_backward(_pooled(lax.add, _zero, 3, 1))),
    "random normal": lambda side, dtype: (lambda: jax.random.normal(jax.random.key(0), (side, side), dtype), ()),
}  # fmt: skip
PARTS: Mapping[str, Callable[[int, Any], Made]] = {
    "gather of rows": _indexed(lambda x, n: x[n]),
    "slice": _on_squares(lambda x: x[3 : 3 + x.shape[0] // 4]),
    "dynamic slice": lambda side, dtype: (
        lambda x, i: lax.dynamic_slice(x, (i, 0), (side // 4, side)), (_square(side, dtype), jax.ShapeDtypeStruct((), jnp.int32))
    ),
    "sum into rows": _indexed(lambda x, n, y: x.at[n].add(y), updates=True),
}  # fmt: skip
"""What needs only some of an argument; of any type."""


def cases() -> Mapping[str, Made]:
    """All by name."""
    found = {}
    for kind, dtype in TYPES.items():
        table_of = {**ANY, **PARTS, **(FLOATS if jnp.issubdtype(dtype, jnp.floating) else {})}
        found |= {f"{name}, {kind}, {side}": make_one(side, dtype) for name, make_one in table_of.items() for side in SIDES}
    return found


def _needed(function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Bytes of arguments and results."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in (*arguments, *jax.tree.leaves(jax.eval_shape(function, *arguments))))


def ours(chip: str) -> Figures:
    """HBM bytes, and those of arguments and results, by operation."""
    row, found = device_of(chip), {}
    for name, (function, arguments) in cases().items():
        program = compile_function(function, arguments, chip=row)
        found[name] = [time_program(program).work.hbm_bytes, _needed(function, arguments)]
    return found


def theirs(chip: str, names: Sequence[str]) -> Figures:
    """XLA:TPU's HBM bytes of some, by operation; None where it refuses."""
    row, found = get_chip(chip), {}
    for name in names:
        function, arguments = cases()[name]
        try:
            found[name] = vendor_costs(compile_ahead(function, arguments, row), row).hbm_bytes
        except ConfigError:
            found[name] = None
    return found


def in_question(rows: Rows, chip: str) -> list[str]:
    """The operations that need less than their arguments, and those whose bytes are beyond the limit of what they need."""
    found = rows.get(chip, {}).get(OURS, {})
    return [name for name, (moved, needed) in found.items() if name.partition(",")[0] in PARTS or moved > LIMIT * needed]


def section(rows: Rows) -> str:
    """The section as Markdown."""
    shown, far = [], []
    for chip in (chip for chip in CHIPS if OURS in rows.get(chip, {})):
        mine, vendor, asked = rows[chip][OURS], rows[chip].get(THEIRS, {}), in_question(rows, chip)
        ratios = {name: mine[name][0] / vendor[name] for name in asked if vendor.get(name)}
        shown.append((chip, str(len(mine)), str(len(mine) - len(asked)), str(len(ratios)), str(sum(x <= LIMIT for x in ratios.values()))))
        far += [(chip, name, f"{x:.2f}") for name, x in ratios.items() if x > LIMIT]
        far += [(chip, name, "XLA:TPU refuses it") for name in asked if vendor.get(name, 0) is None]
    heading = ("chip", "operations", f"within {LIMIT:g} of what they need", "compared with XLA:TPU", f"of these within {LIMIT:g}")
    sides = ", ".join(map(str, SIDES))
    return f"""HBM bytes of {len(ANY) + len(FLOATS) + len(PARTS)} operations on squares of {sides} and pictures of as many elements, in
{", ".join(TYPES)}, beside the bytes of their arguments and results, and beside XLA:TPU's where that does not settle it.

{table(heading, shown)}

Beyond:

{table(("chip", "operation", "ours over theirs"), far)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one side or both, and write the section."""
    chosen = options("xla_operations", __doc__).parse_args(arguments)
    rows = kept(RESULTS)
    if chosen.compile:
        tasks = {(chip, THEIRS): (theirs, (chip, in_question(rows, chip))) for chip in wanted(CHIPS, chosen.only)}
    else:
        tasks = {(chip, OURS): (ours, (chip,)) for chip in wanted(CHIPS, chosen.only)}
    put_section(PAGE, TITLE, section(make(RESULTS, tasks, chosen.jobs)))


if __name__ == "__main__":
    main()
