"""Bits do not depend on the engine, on host threads, on the host's instruction set, or on the hash seed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import ten_steps, tolerances

pytestmark = pytest.mark.optimised

ROOT = Path(__file__).parent.parent


_run = functools.cache(ten_steps.run)


def _in_process(cores: int, policies: Sequence[str], **environment: str) -> dict[str, dict[str, str]]:
    """Digests from a fresh process that may use `cores` host cores (XLA:CPU takes one thread a core)."""
    usable = set(sorted(os.sched_getaffinity(0))[:cores])
    done = subprocess.run(
        [sys.executable, "-m", "tests.ten_steps", *policies], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True,
        timeout=900, preexec_fn=lambda: os.sched_setaffinity(0, usable),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ten_steps.POLICIES)
def test_ten_steps_on_both_engines_agree_in_every_bit(policy: str) -> None:
    reference, fast = ten_steps.run(policy, engine="reference"), _run(policy)
    assert reference.losses == fast.losses
    for a, b in zip(ten_steps.leaves(reference), ten_steps.leaves(fast), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.slow
def test_ten_steps_do_not_depend_on_the_hosts_threads_instructions_or_hash_seed() -> None:
    policies = ("fp32", "mixed", "mixed_bf16")
    elsewhere = _in_process(1, policies, XLA_FLAGS="--xla_cpu_max_isa=SSE4_2", PYTHONHASHSEED="12345")
    assert elsewhere == {policy: ten_steps.digest(_run(policy)) for policy in policies}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ten_steps.POLICIES)
def test_native_stays_within_its_bounds_over_ten_steps(policy: str) -> None:
    exact, native = _run(policy), _run(policy, fidelity="native")
    _assert_near(ten_steps.leaves(exact), ten_steps.leaves(native), policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ten_steps.POLICIES)
def test_plain_jit_stays_within_the_same_bounds_over_ten_steps(policy: str) -> None:
    native = _run(policy, fidelity="native")
    _assert_near(ten_steps.plain_jit_leaves(policy), ten_steps.leaves(native), policy)


def _assert_near(wanted: list[np.ndarray], got: list[np.ndarray], policy: str) -> None:
    """Every tensor within the policy's share of its largest magnitude."""
    for a, b in zip(wanted, got, strict=True):
        x, y = a.astype(np.float64), b.astype(np.float64)
        scale = max(1e-30, float(np.max(np.abs(x), initial=0.0)))
        assert float(np.max(np.abs(x - y), initial=0.0)) <= tolerances.TEN_STEPS[policy] * scale, policy
