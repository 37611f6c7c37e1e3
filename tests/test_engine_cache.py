"""Translated Programs of a process: which have an engine together, when they are hashed, and which are forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import tpuflow
from tpuflow.device.fast import cache
from tpuflow.device.fast.cache import engine_for
from tpuflow.isa.program import Program


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Before and after."""
    cache.clear()
    yield
    cache.clear()


def _plus(number: int, length: int = 8) -> Program:
    return tpuflow.jit(lambda x: x * 2 + number).program(jax.ShapeDtypeStruct((length,), jnp.float32))


def test_programs_of_the_same_code_have_one_engine_and_others_their_own():
    first, again, other = (engine_for(_plus(n), "native") for n in (1, 1, 2))
    assert first is again and first is not other
    assert engine_for(_plus(1), "bitexact") is not first
    assert engine_for(_plus(2), "native") is other


def test_a_program_is_not_hashed_before_another_has_its_buffers(monkeypatch: pytest.MonkeyPatch):
    hashed: list[Program] = []
    own = cache.code_hash
    monkeypatch.setattr(cache, "code_hash", lambda program: hashed.append(program) or own(program))
    one, longer, alike = _plus(1), _plus(1, 9), _plus(2)
    for program in (one, longer):
        engine_for(program, "native")
    assert not hashed
    engine_for(alike, "native")
    assert hashed == [alike]


def test_what_is_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "CAPACITY", 3)
    engines = {n: engine_for(_plus(n), "native") for n in (1, 2, 3)}
    assert engine_for(_plus(1), "native") is engines[1]
    engine_for(_plus(4), "native")  # in place of the second
    assert all(engine_for(_plus(n), "native") is engines[n] for n in (1, 3))
    assert engine_for(_plus(2), "native") is not engines[2]
    for number in (1, 2, 3):
        engine_for(_plus(number, 9), "native")
    assert engine_for(_plus(1), "native") is not engines[1]
