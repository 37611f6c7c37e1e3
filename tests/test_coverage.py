"""The page of what runs on the device knows all of JAX and StableHLO, and says what is so."""

from __future__ import annotations

import re
import subprocess
import sys

from tests import coverage
from tpuflow.lower.importers.advice import FAMILIES


def test_every_primitive_of_jax_and_every_operation_of_stablehlo_is_on_the_page() -> None:
    """Otherwise: python -m tests.coverage"""
    done = subprocess.run([sys.executable, "-m", "tests.coverage", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_primitive_that_jax_gets_is_missed(monkeypatch) -> None:
    monkeypatch.setattr(coverage, "primitives_of_jax", lambda: {"add", "a_new_one"})
    monkeypatch.setattr(coverage, "operations_of_stablehlo", lambda: {"stablehlo.add", "stablehlo.a_new_one"})
    assert coverage.unknown() == {"a_new_one", "stablehlo.a_new_one"}


def test_nothing_is_in_two_groups() -> None:
    for groups in (coverage.primitives(), coverage.operations()):
        assert sum(map(len, groups.values())) == len(set().union(*groups.values()))


def test_what_has_no_rule_says_what_to_do_instead() -> None:
    assert all(family.instead and not re.search(r"\.$", family.instead) for family in FAMILIES)
