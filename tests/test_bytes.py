"""Names and source lines are not part of what runs: a stripped Program that went through text is the same in values, tiers and speed."""

from __future__ import annotations

import numpy as np
import pytest

from tests import ten_steps
from tpuflow.device.runtime import Executable
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import code_hash, from_bytes, to_bytes


@pytest.mark.parametrize("policy", ["fp32", "mixed"])
def test_every_kernel_of_the_mnist_step_is_lifted_with_or_without_names(policy: str) -> None:
    (executable,) = ten_steps.run(policy, fidelity="native").executables
    rows = executable.profile()
    assert rows and all(r.tier == 1 for r in rows), rows
    products = [r for r in rows if " dot " in r.name]
    assert products and all(r.source.startswith("mlp.py:") for r in products), "the loss and the optimizer have no line of the user's"
    stripped = assemble(disassemble(from_bytes(to_bytes(executable.program.strip()))))
    assert code_hash(stripped) == code_hash(executable.program), "the same code is translated and cached once: equal tiers and speed"
    bare = Executable(stripped)
    assert [(r.place, r.tier) for r in bare.profile()] == [(r.place, r.tier) for r in rows]
    x, y = ten_steps.data()
    feeds = [x.reshape(ten_steps.STEPS, ten_steps.BATCH, 28, 28), y.reshape(ten_steps.STEPS, ten_steps.BATCH)]
    first, second = (e.launch(_inputs(executable), feeds, count=ten_steps.STEPS) for e in (executable, bare))
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _inputs(executable: Executable) -> list[np.ndarray]:
    """The trip count, and small numbers for every parameter."""
    rng = np.random.default_rng(1)
    ports = executable.program.inputs
    return [np.asarray(ten_steps.STEPS if i == 0 else rng.random(p.shape) / 64).astype(p.dtype.numpy) for i, p in enumerate(ports)]
