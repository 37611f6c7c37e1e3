"""Fourier transforms that a Program makes of products with matrices of roots of unity, as XLA:CPU's own; natively.

The transform of 256 rows of 1024 numbers takes XLA:CPU 0.4 ms, its two products 0.8, and what is between them half as much. It is found in
what was traced, whatever it was written as: an array that is linear, row by row, in one or two others, through two products with constants
or more, and that is the real or the imaginary part of their transform (`samples`). Of finite numbers, none of its results is farther from
the exact one than a sum of the row in whatever order may be. Where there are others, a transform's first number, to which all of its row
are added, is not finite either, and the products are made after all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.rewriting import Env, Variable, bound
from tpuflow.device.fast.samples import NotLinear, Sample, constant, multiplies, result, source
from tpuflow.dtypes import F32
from tpuflow.isa.dma import Load
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Program
from tpuflow.jaxprs.compat import Equation, Jaxpr, Literal

LEAST_PRODUCTS, LEAST_ELEMS = 2, 2**13
"""What transforms are worth it, in products and in elements: [64, 160] takes 0.09 ms either way, [8, 256] 0.05 by products and 0.08 so."""
TOLERANCE = 32 * 2.0**-24
"""What roots of unity rounded to f32 may change in a transform of n random numbers between 1 and 2, over the square root of n."""

Parts = tuple[Variable, Variable]
"""The arrays whose rows are the real and the imaginary parts of numbers; None is 0."""


@dataclass(frozen=True)
class Transform:
    """`results`, each the first numbers' real or imaginary parts (0 or 1) of the transforms of the rows of `parts`, of one size; the
    `equations` make them of these parts and constants."""

    parts: Parts
    rows: int
    results: Mapping[Variable, int]
    equations: tuple[Equation, ...]

    def values(self, env: Env) -> dict[Variable, Any]:
        """The results as XLA:CPU's transform makes them, or, if a row has a number that is not finite, as the equations do."""
        given = {p: env[p].reshape(self.rows, -1) for p in self.parts if p is not None}
        found = self._transformed(given, next(iter(self.results)).aval.size // self.rows)
        first = lax.slice_in_dim(found, 0, 1, axis=1)
        finite = jnp.all(lax.is_finite(lax.real(first)) & lax.is_finite(lax.imag(first)))

        def made(_: Any) -> Any:
            made = self._made({**env, **{p: x.reshape(p.aval.shape) for p, x in given.items()}})
            planes = [next((made[v].reshape(found.shape) for v, n in self.results.items() if n == plane), None) for plane in (0, 1)]
            return jnp.bool_(False), _complex(planes)

        found = lax.while_loop(lambda state: state[0], made, (~finite, found))[1]
        return {v: (lax.imag if plane else lax.real)(found).reshape(v.aval.shape) for v, plane in self.results.items()}

    def _transformed(self, given: Mapping[Variable, Any], count: int) -> Any:
        """The first numbers of each row's transform."""
        real, imag = (None if p is None else given[p] for p in self.parts)
        if real is not None and imag is None and 2 * (count - 1) <= real.shape[1]:
            found = lax.fft(real, "RFFT", (real.shape[1],))
        else:
            numbers = _complex((real, imag))
            found = lax.fft(numbers, "FFT", (numbers.shape[1],))
        return lax.slice_in_dim(found, 0, count, axis=1)

    def _made(self, env: Env) -> dict[Variable, Any]:
        here = dict(env)
        for equation in self.equations:
            here.update(bound(equation, here))
        return here


def _complex(parts: Sequence[Any]) -> Any:
    some = next(p for p in parts if p is not None)
    return lax.complex(*(jnp.zeros_like(some) if p is None else p for p in parts))


def multiplies_roots(program: Program) -> bool:
    """Whether a kernel with a product reads a constant that could be a matrix of roots of unity: what is worth looking at."""
    tables = {c.buffer for c in program.constants if program.buffers[c.buffer].dtype == F32 and _could_be_roots(c.data)}
    return bool(tables) and any(
        any(isinstance(i, MatmulAccumulate) for i in kernel.instructions)
        and any(isinstance(i, Load) and i.window.buffer in tables for i in kernel.instructions)
        for kernel in program.kernels()
    )


def _could_be_roots(data: bytes) -> bool:
    numbers = np.abs(np.frombuffer(data, np.float32))
    return bool(numbers.size > 1 and numbers.max() == 1 and ((numbers > 0) & (numbers < 1)).any())


def transforms(jaxpr: Jaxpr, constants: Env) -> dict[Variable, Transform]:
    """The transforms of a jaxpr, by each of their results."""
    samples = {v: s for v, x in constants.items() if (s := constant(v, x)) is not None}
    sources: dict[Variable, Sample] = {}
    spectra: dict[Parts, np.ndarray] = {}
    hits: dict[tuple[frozenset[Variable], int, int], dict[Variable, dict[Parts, int]]] = defaultdict(dict)
    for equation, operands in _with_equals_as_one(jaxpr):
        sample = _sample(equation, operands, samples, sources)
        if sample is None:
            continue
        var: Variable = equation.outvars[0]
        found = _as_transform(sample, sources, spectra) if sample.products >= LEAST_PRODUCTS else {}
        if found:
            hits[frozenset(sample.sources), sample.rows, var.aval.size][var] = found
        else:
            samples[var] = sample
    return {v: t for (_, rows, _), group in hits.items() for t in _grouped(jaxpr, rows, group) for v in t.results}


def _with_equals_as_one(jaxpr: Jaxpr) -> Iterator[tuple[Equation, list[Variable]]]:
    """Each equation and its operands; of arrays that are reshaped alike, as by several kernels that read them, the first."""
    same: dict[Variable, Variable] = {}
    reshaped: dict[tuple[Variable, tuple[int, ...]], Variable] = {}
    for equation in jaxpr.eqns:
        operands = [v if isinstance(v, Literal) else same.get(v, v) for v in equation.invars]
        if equation.primitive.name == "reshape" and not isinstance(operands[0], Literal):
            var: Variable = equation.outvars[0]
            same[var] = reshaped.setdefault((operands[0], var.aval.shape), var)
        yield equation, operands


def _sample(
    equation: Equation, operands: Sequence[Variable], samples: Mapping[Variable, Sample], sources: dict[Variable, Sample]
) -> Sample | None:
    """The sample of an equation's result; of a product with a constant, if need be, as one of a new source."""
    known = [constant(v, v.val) if isinstance(v, Literal) else samples.get(v) for v in operands]
    try:
        return result(equation, [_some(x) for x in known])
    except NotLinear:
        pass
    others = [i for i, x in enumerate(known) if x is None or x.sources]
    if len(others) != 1 or len(known) != 2 or not multiplies(equation):
        return None
    var = operands[others[0]]
    for rows in dict.fromkeys((*var.aval.shape[:1], 1)):
        try:
            given = sources[var] if var in sources else source(var, rows, len(sources))
            found = result(equation, [given if i == others[0] else _some(x) for i, x in enumerate(known)])
        except NotLinear:
            continue
        sources[var] = given
        return found
    return None


def _some(sample: Sample | None) -> Sample:
    if sample is None:
        raise NotLinear
    return sample


def _as_transform(sample: Sample, sources: Mapping[Variable, Sample], spectra: dict[Parts, np.ndarray]) -> dict[Parts, int]:
    """Of what arrays a sample is the real (0) or the imaginary (1) part of the transform."""
    size = sample.sources[0].aval.size
    values = sample.values.reshape(sample.taken, -1)
    alike = len(sample.sources) <= 2 and all(s.aval.size == size for s in sample.sources)
    if not alike or size < LEAST_ELEMS or not 1 < values.shape[1] <= size // sample.rows:
        return {}
    first, second = (*sample.sources, None)[:2]
    found: dict[Parts, int] = {}
    for parts in ((first, second), (second, first)):
        if parts not in spectra:
            real, imag = (0 if p is None else sources[p].values.reshape(sample.taken, -1) for p in parts)
            spectra[parts] = np.fft.fft(real + 1j * imag)
        most = TOLERANCE * math.sqrt(spectra[parts].shape[1])
        spectrum = spectra[parts][:, : values.shape[1]]
        for plane, numbers in enumerate((np.real(spectrum), np.imag(spectrum))):
            if np.abs(values - numbers).max() <= most:
                found[parts] = plane
    return found


def _grouped(jaxpr: Jaxpr, rows: int, found: Mapping[Variable, Mapping[Parts, int]]) -> Iterator[Transform]:
    """As few transforms as have all results."""
    left = dict(found)
    while left:
        often = [parts for of in left.values() for parts in of]
        parts = max(often, key=often.count)
        results = {v: of[parts] for v, of in left.items() if parts in of}
        yield Transform(parts, rows, results, _between(jaxpr, parts, results))
        left = {v: of for v, of in left.items() if v not in results}


def _between(jaxpr: Jaxpr, parts: Parts, results: Mapping[Variable, int]) -> tuple[Equation, ...]:
    """The equations that make the results of the parts and of constants."""
    needed, found = set(results), []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed |= {v for v in equation.invars if not isinstance(v, Literal) and v not in parts}
            found.append(equation)
    return tuple(reversed(found))
