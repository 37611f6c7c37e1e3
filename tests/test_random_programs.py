"""Random programs: the reference engine and the fast engine agree in bits, and both stand close to JAX operation by operation."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.random_programs import STEPS, RandomProgram, Step, evaluate, random_programs
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable

EXAMPLES = int(os.environ.get("TPUFLOW_RANDOM_PROGRAMS", "40"))
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
TINY = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}


def _launch(program: object, arrays: list[np.ndarray], engine: str, fidelity: str = "bitexact") -> list[np.ndarray]:
    outputs, _ = Executable(program, engine=engine, fidelity=fidelity).launch(arrays)
    return [np.asarray(x) for x in outputs]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _close(step_ulps: float, got: np.ndarray, wanted: np.ndarray, magnitude: float) -> bool:
    """Within `step_ulps` (plus one for each side's rounding) of the larger of the result and what entered a sum."""
    if got.dtype.name not in EPS:
        apart = got.astype(np.int64) - wanted.astype(np.int64)
        return bool(np.all(np.abs(apart) <= (1 if got.dtype != bool and step_ulps else 0)))
    eps, tiny = EPS[got.dtype.name], TINY[got.dtype.name]
    x, y = got.astype(np.float64), wanted.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    scale = np.maximum(np.maximum(np.abs(x), np.abs(y)), magnitude if step_ulps >= 16 else 0)
    with np.errstate(invalid="ignore"):
        near = np.abs(x - y) <= (step_ulps + 1) * eps * scale + 2 * tiny
    largest = float(ml_dtypes.finfo(got.dtype).max)
    overflow = (np.isinf(x) & (np.abs(y) > largest * (1 - 64 * eps))) | (np.isinf(y) & (np.abs(x) > largest * (1 - 64 * eps)))
    return bool(np.all(same | near | overflow))


def _mass(x: np.ndarray) -> float:
    """A bound on what one row of an operand can bring to a sum: its largest finite magnitude times the row's length."""
    wide = x.astype(np.float64)
    return float(np.max(np.abs(wide), initial=0, where=np.isfinite(wide))) * max(1, x.shape[-1] if x.ndim else 1)


def _order_matters(step: Step, operands: list[np.ndarray], dtype: np.dtype) -> bool:
    """Whether some orders of adding may go beyond the largest number on the way, and others not."""
    product = step.op == "matmul" or step.op.startswith("conv")
    mass = sum(float(np.sum(np.abs(wide), where=np.isfinite(wide))) for wide in (x.astype(np.float64) for x in operands))
    largest = float(ml_dtypes.finfo(np.float32 if product else dtype).max) if dtype.name in EPS else np.inf
    return STEPS[step.op].ulps >= 16 and (mass * mass if product else mass) >= largest


def _check_places(program: RandomProgram, inputs: list[np.ndarray], pool: list[np.ndarray], *, values: bool) -> None:
    """Infinities and NaN of every step are where JAX, or enumeration, has them on the device's own operands; `values`: so is all else."""
    arrays = [*inputs, *pool]
    with jax.disable_jit():
        for step, got in zip(program.steps, pool, strict=True):
            operands = [arrays[i] for i in step.args]
            if _order_matters(step, operands, got.dtype):
                continue
            wanted = STEPS[step.op].wanted(operands, step.params)
            if not values and got.dtype.name in EPS:
                wanted = np.where(np.isfinite(got.astype(np.float64)) & np.isfinite(wanted.astype(np.float64)), got, wanted)
            assert _close(STEPS[step.op].ulps, got, wanted, sum(map(_mass, operands))), (step, got, wanted)


def _check_against_jax(program: RandomProgram, inputs: list[np.ndarray], pool: list[np.ndarray]) -> None:
    """Every step, run by JAX without jit on the device's own operands, gives nearly the device's result."""
    arrays = [*inputs, *pool]
    with jax.disable_jit():
        for step, got in zip(program.steps, pool, strict=True):
            operands = [arrays[i] for i in step.args]
            wanted = STEPS[step.op].wanted(operands, step.params)
            magnitude = sum(map(_mass, operands))
            assert _close(STEPS[step.op].ulps, got, wanted, magnitude), (step, got, wanted)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(random_programs())
def test_random_programs_agree_in_bits_and_with_jax_op_by_op(program: RandomProgram) -> None:
    inputs = program.arrays()
    compiled = compile_function(lambda *xs: evaluate(program, *xs), inputs)
    reference = _launch(compiled, inputs, "reference")
    fast = _launch(compiled, inputs, "fast")
    for step, a, b in zip(program.steps, reference, fast, strict=True):
        assert _same_bits(a, b), (step, a, b)
    _check_against_jax(program, inputs, reference)


@pytest.mark.slow
@settings(max_examples=max(1, EXAMPLES // 5), deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(random_programs(max_steps=12), st.sampled_from((0.02, 0.3)))
def test_infinities_nan_and_subnormals_come_where_operations_put_them(program: RandomProgram, share: float) -> None:
    inputs = program.arrays(special=share)
    compiled = compile_function(lambda *xs: evaluate(program, *xs), inputs)
    reference, fast = _launch(compiled, inputs, "reference"), _launch(compiled, inputs, "fast")
    for step, a, b in zip(program.steps, reference, fast, strict=True):
        assert _same_bits(a, b), (step, a, b)
    _check_places(program, inputs, reference, values=True)
    _check_places(program, inputs, _launch(compiled, inputs, "fast", "native"), values=False)  # in its own order, contracted, its own exp


@pytest.mark.slow
@settings(max_examples=max(1, EXAMPLES // 5), deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(random_programs(max_steps=12), st.integers(0, 2**16))
def test_stable_random_programs_agree_with_jax_as_a_whole(program: RandomProgram, seed: int) -> None:
    inputs = program.arrays()
    compiled = compile_function(lambda *xs: evaluate(program, *xs), inputs)
    got = _launch(compiled, inputs, "fast", "native")
    nudged = [_nudge(x, np.random.default_rng(seed)) for x in inputs]
    with jax.disable_jit():
        wanted = [np.asarray(x) for x in evaluate(program, *map(jnp.asarray, inputs))]
        moved = [np.asarray(x) for x in evaluate(program, *map(jnp.asarray, nudged))]
    for step, a, b, c in zip(program.steps, got, wanted, moved, strict=True):
        scale = float(np.max(np.abs(b.astype(np.float64)), initial=0, where=np.isfinite(b.astype(np.float64))))
        bound = 1e-2 if b.dtype != np.float32 else 1e-4
        if _far(b, c, bound * scale / 8):
            continue
        assert not _far(a, b, bound * scale + 1e-6), (step, a, b)


def _nudge(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every float moved by one unit in the last place, up or down."""
    if x.dtype.name not in EPS:
        return x
    toward = np.where(rng.random(x.shape) < 0.5, -np.inf, np.inf).astype(x.dtype)
    return np.asarray(np.nextafter(x, toward), dtype=x.dtype)


def _far(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differ = ~((x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= bound))
    return bool(np.any(differ))
