"""The bytes are what runs: forged and mutated binaries give both engines the same bits, or the same refusal, and cost neither much.

A small part of what `python -m tests.attack` does at length.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests import attack, forging, mutating
from tests.attack import Verdict, table
from tests.quick import FLAGS
from tpuflow.device.verify import verify
from tpuflow.errors import ProgramError
from tpuflow.isa.file import from_bytes

MOST_SECONDS = 2.0  # of verifying a file of less than 100 kB


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "files"), [("forged", 100), ("mutated", 120)])
def test_both_engines_agree_on_forged_and_mutated_binaries_or_refuse_alike(kind: str, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    crops = "--xla_cpu_use_fusion_emitters=true"  # without which XLA:CPU refuses some paddings that take away
    monkeypatch.setenv("XLA_FLAGS", f"{FLAGS} {crops}")  # of the processes that judge
    verdicts = list(attack.attack([(kind, seed) for seed in range(files)]))
    assert not [v for v in verdicts if v.outcome == "finding"], table(verdicts)
    count = {outcome: sum(v.outcome == outcome for v in verdicts) for outcome in ("agree", "refused")}
    assert min(count.values()) > files // 5, table(verdicts)


@pytest.mark.parametrize("family", dict.fromkeys(forging.FAMILIES), ids=lambda f: f.__name__)
def test_every_forged_program_is_verified_or_refused_in_no_time(family: forging.Family) -> None:
    rng = np.random.default_rng(7)
    for _ in range(25):
        program = family(rng)
        began = time.process_time()
        try:
            verify(program)
        except ProgramError as error:
            assert str(error)
        assert time.process_time() - began < MOST_SECONDS


@pytest.mark.parametrize("kind", attack.KINDS)
def test_every_file_is_a_program_or_a_clear_error_and_the_same_seed_makes_it_again(kind: str) -> None:
    accepted = 0
    for seed in range(150):
        data = attack.KINDS[kind](np.random.default_rng(seed))
        assert data == attack.KINDS[kind](np.random.default_rng(seed)) and len(data) < 2 * forging.MOST_BYTES
        try:
            verify(from_bytes(data))
            accepted += 1
        except ProgramError as error:
            assert str(error)
    assert 30 < accepted < 120


def test_feeds_are_among_what_is_forged_and_mutated() -> None:
    programs = [forging.fed(p, np.random.default_rng(0)) for p in mutating.PROGRAMS]
    assert sum(bool(p.infeeds) for p in programs) > len(programs) // 3 and all(p.outfeeds for p in programs if p.outputs)


@pytest.mark.slow
def test_a_file_that_kills_its_process_is_a_finding() -> None:
    found = list(attack.attack([("no such kind", 1), ("mutated", 2)]))
    assert found[0].outcome == "finding" and "the process died with exit status 1" in found[0].text
    assert found[1].outcome != "finding" and found[1].kind == "mutated"


def test_the_table_says_how_many_were_refused_and_why() -> None:
    verdicts = [Verdict("forged", 0, "agree", "", 0.5), Verdict("forged", 1, "refused", "LimitError: too much", 1.25)]
    assert table(verdicts).splitlines()[1].split() == ["forged", "2", "1", "1", "0", "1.25s"]
    assert table(verdicts).endswith("refusals: LimitError 1")
