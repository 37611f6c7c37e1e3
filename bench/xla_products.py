"""Products and convolutions beside XLA:TPU's: `python -m bench.xla_products` writes a section of docs/xla_tpu.md.

Compared are modelled seconds on our side, and the cycles that XLA:TPU expects over the chip's clock, of one of the devices that it compiles
for (of some generations half a chip). `--compile`: as in `bench.xla_tpu`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.kept_rows import Figures, Rows, kept, make, options, wanted
from bench.recorded import table
from bench.sections import put_section
from bench.xla_tpu import CHIPS, OURS, PAGE, THEIRS
from tpuflow.chips import Chip, get_chip
from tpuflow.comparing.comparing import vendor_costs
from tpuflow.comparing.vendor import GENERATIONS, compile_ahead
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program
from tpuflow.reports.profile import profile

RESULTS, TITLE = Path(__file__).parent / "results" / "xla_products.json", "Products and convolutions"
MEDIAN, MOST = 1.15, 2.0
SHORT, ZEROS = "short sums", "zeros"
FEW_CYCLES = 25
"""At most so many for a register of results are what XLA:TPU expects of the shortest sums."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of arrays of these shapes."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _dense(rows: int, inner: int, columns: int) -> Iterator[Operation]:
    """A dense layer's product, and those of its gradients."""
    x, w, y = _bf16(rows, inner), _bf16(inner, columns), _bf16(rows, columns)
    name = f"[{rows}, {inner}] x [{inner}, {columns}]"
    yield Operation(name, lambda x, w: x @ w, (x, w))
    yield Operation(f"{name}, gradient of the input", lambda y, w: y @ w.T, (y, w))
    yield Operation(f"{name}, gradient of the kernel", lambda x, y: x.T @ y, (x, y))


def _attention(batch: int, length: int, width: int) -> Iterator[Operation]:
    """Scores, and what is mixed by their weights."""
    q, weights = _bf16(batch, length, width), _bf16(batch, length, length)
    yield Operation(f"{batch} scores of {length} x {width}", lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k), (q, q))
    yield Operation(f"{batch} of {length} x {length} weights", lambda w, v: jnp.einsum("bqk,bkd->bqd", w, v), (weights, q))
    yield Operation(f"{batch} of {length} x {length} weights, transposed", lambda w, v: jnp.einsum("bqk,bqd->bkd", w, v), (weights, q))


def _convolution(batch: int, side: int, inputs: int, outputs: int, window: int, stride: int) -> Iterator[Operation]:
    """A convolution of pictures, and its gradients."""
    x, w = _bf16(batch, side, side, inputs), _bf16(window, window, inputs, outputs)
    convolve = partial(
        lax.conv_general_dilated, window_strides=(stride, stride), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = jax.eval_shape(convolve, x, w)
    name = f"{side} x {side}, {inputs} to {outputs}, {window} x {window}{f' by {stride}' if stride > 1 else ''}"
    yield Operation(name, convolve, (x, w))
    if inputs > 3:
        yield Operation(f"{name}, gradient of the input", lambda y, w: jax.linear_transpose(lambda x: convolve(x, w), x)(y)[0], (y, w))
    yield Operation(f"{name}, gradient of the kernel", lambda x, y: jax.linear_transpose(lambda w: convolve(x, w), w)(y)[0], (x, y))


RESNET = (
    (224, 3, 64, 7, 2), (56, 64, 64, 1, 1), (56, 64, 64, 3, 1), (56, 64, 256, 1, 1), (56, 256, 64, 1, 1), (56, 256, 128, 1, 1),
    (56, 128, 128, 3, 2), (28, 128, 512, 1, 1), (56, 256, 512, 1, 2), (28, 512, 128, 1, 1), (28, 128, 128, 3, 1), (28, 512, 256, 1, 1),
    (28, 256, 256, 3, 2), (14, 256, 1024, 1, 1), (28, 512, 1024, 1, 2), (14, 1024, 256, 1, 1), (14, 256, 256, 3, 1), (14, 1024, 512, 1, 1),
    (14, 512, 512, 3, 2), (7, 512, 2048, 1, 1), (14, 1024, 2048, 1, 2), (7, 2048, 512, 1, 1), (7, 512, 512, 3, 1),
)  # fmt: skip
VGG = ((224, 3, 64), (224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), (56, 256, 256), (28, 256, 512), (28, 512, 512),
       (14, 512, 512))  # fmt: skip
GPT2 = ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50304))
BERT = ((1024, 1024), (1024, 4096), (4096, 1024))


def groups() -> Mapping[str, Sequence[Operation]]:
    """The shapes of training steps, and a grid of products."""
    grid = (next(_dense(*sizes)) for sizes in product((256, 1024, 4096), repeat=3))
    return {
        "ResNet-50": [one for sizes in RESNET for one in _convolution(32, *sizes)],
        "VGG-16": [one for sizes in VGG for one in _convolution(32, *sizes, 3, 1)],
        "GPT-2": [*(one for sizes in GPT2 for one in _dense(8192, *sizes)), *_attention(96, 1024, 64)],
        "BERT-large": [*(one for sizes in BERT for one in _dense(4096, *sizes)), *_attention(128, 512, 64)],
        "a grid": list(grid),
    }


def device_of(chip: str) -> Chip:
    """What XLA:TPU compiles for: the chip, or the one of its cores."""
    row, count = get_chip(chip), GENERATIONS[chip].devices_a_chip
    return replace(row, cores=row.cores // count, hbm_bytes=row.hbm_bytes // count, hbm_bytes_per_second=row.hbm_bytes_per_second / count)


def theirs(group: str, chip: str) -> Figures:
    """Seconds that XLA:TPU expects, by operation."""
    row = get_chip(chip)
    found = ((one.name, compile_ahead(one.function, one.arguments, row)) for one in groups()[group])
    return {name: vendor_costs(compiled, row).product_seconds for name, compiled in found}


def ours(group: str, chip: str) -> Figures:
    """Seconds that we model, of the kernels with products."""
    programs = ((one.name, compile_function(one.function, one.arguments, chip=device_of(chip))) for one in groups()[group])
    return {name: sum(k.seconds for k in profile(program, time_program(program)).kernels if k.macs) for name, program in programs}


@dataclass(frozen=True, slots=True)
class Compared:
    """An operation on both sides: ours over theirs, and the cycles that XLA:TPU expects for a register of results."""

    chip: str
    name: str
    ratio: float
    cycles: float

    @property
    def is_far(self) -> bool:
        """Whether one side takes more than `MOST` times the other's time."""
        return not 1 / MOST <= self.ratio <= MOST

    @property
    def cause(self) -> str:
        """Why XLA:TPU expects that it takes so much longer than ours; "" where no cause is known."""
        if self.ratio < 1 and " by 2, gradient of the input" in self.name:
            return ZEROS
        return SHORT if self.ratio < 1 and self.cycles <= FEW_CYCLES else ""


def compared(rows: Rows) -> list[Compared]:
    """All operations that both sides have, chip by chip."""
    found = []
    for chip, (group, operations) in product(CHIPS, groups().items()):
        sides = rows.get(f"{group} | {chip}", {})
        for one in operations if OURS in sides and THEIRS in sides else ():
            if expected := sides[THEIRS].get(one.name):
                ratio = sides[OURS][one.name] / expected
                found.append(Compared(chip, f"{group}: {one.name}", ratio, cycles_a_register(one, chip, expected)))
    return found


def cycles_a_register(one: Operation, chip: str, seconds: float) -> float:
    """The cycles that an operation takes for each register of its results."""
    *rows, columns = jax.eval_shape(one.function, *one.arguments).shape
    row = get_chip(chip)
    registers = math.ceil(math.prod(rows) / row.vector_sublanes) * math.ceil(columns / row.vector_lanes)
    return seconds * row.clock_hz / registers


def section(rows: Rows) -> str:
    """The section as Markdown: factors by chip, and those beyond the limit."""
    found = compared(rows)
    shown = [_factors(chip, some) for chip in CHIPS if (some := [one.ratio for one in found if one.chip == chip])]
    far = [(one.chip, one.name, f"{one.ratio:.2f}", f"{one.cycles:.0f}", one.cause) for one in found if one.is_far]
    return f"""Modelled time of a product or convolution in bf16, ours over what XLA:TPU expects; a factor is how far apart both are,
whichever takes longer.

{table(("chip", "shapes", "median factor", "ours over theirs, median", "least", "most", f"within {MOST:g}"), shown)}

Farther apart, with the cycles that XLA:TPU expects for a register of results (8 x 128), and why:

{table(("chip", "operation", "ours over theirs", "cycles a register", "cause"), far)}

{SHORT}: XLA:TPU expects at least a dozen cycles for a register of results, as many whether 64, 128 or 256 terms are summed; ours are bound
by the arrays, or by HBM at the bandwidth that microbenchmarks reach. {ZEROS}: the gradient of what a strided convolution reads is, for
XLA:TPU, a convolution of pictures with zeros between their pixels; ours is one for each phase of the stride, without them."""


def beyond(rows: Rows) -> list[str]:
    """Chips whose median is beyond the limit, and operations that are far apart for no known cause."""
    found = compared(rows)
    medians = {chip: _median([one.ratio for one in found if one.chip == chip]) for chip in dict.fromkeys(one.chip for one in found)}
    return [
        *(f"{chip}: median factor {x:.3f}" for chip, x in medians.items() if x > MEDIAN),
        *(f"{one.chip}: {one.name}: {one.ratio:.2f}" for one in found if one.is_far and not one.cause),
    ]


def _median(ratios: Sequence[float]) -> float:
    return statistics.median(max(x, 1 / x) for x in ratios)


def _factors(chip: str, ratios: Sequence[float]) -> tuple[str, ...]:
    figures = (_median(ratios), statistics.median(ratios), min(ratios), max(ratios))
    within = sum(1 / MOST <= x <= MOST for x in ratios) / len(ratios)
    return (chip, str(len(ratios)), *(f"{x:.2f}" for x in figures), f"{within:.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one side or both, and write the section."""
    chosen = options("xla_products", __doc__).parse_args(arguments)
    rows, side, function = kept(RESULTS), *((THEIRS, theirs) if chosen.compile else (OURS, ours))
    names = {f"{group} | {chip}": (group, chip) for chip in CHIPS for group in groups()}
    missing = [name for name in wanted(names, chosen.only) if not (chosen.compile and side in rows.get(name, {}))]
    tasks = {(name, side): (function, names[name]) for name in missing}
    rows = make(RESULTS, tasks, chosen.jobs)
    put_section(PAGE, TITLE, section(rows))
    print("\n".join(beyond(rows)) or "no median is beyond its limit, and what is far apart has a known cause")


if __name__ == "__main__":
    main()
