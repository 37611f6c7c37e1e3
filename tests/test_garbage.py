"""What large blocks leave to Python's garbage collector: no cycles, and no pass over all that they made."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp

import tpuflow


def _run(code: str) -> str:
    """What a process prints in which nobody has frozen objects, as the tests' own process has."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


_PASSES = """
    import gc
    from tpuflow import garbage

    passes = []
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if phase == "start" else None)
"""


def test_what_a_block_has_made_is_not_walked_through() -> None:
    out = _run(
        _PASSES
        + """
    with garbage.undisturbed():
        kept = [[] for _ in range(2 * garbage.MANY)]
    print(gc.isenabled(), passes, gc.get_count()[0] < 100, gc.get_freeze_count(), garbage._left >= 2 * garbage.MANY)
    """
    )
    assert out.split() == ["True", "[]", "True", "0", "True"]


def test_a_block_collects_what_many_have_left() -> None:
    out = _run(
        _PASSES
        + """
    garbage.TOO_MANY = 5 * garbage.MANY
    for n in range(3):
        with garbage.undisturbed():
            cycles = [[] for _ in range(3 * garbage.MANY)]
            for x in cycles:
                x.append(x)
            del cycles, x
        print(len(gc.get_objects()) > 3 * garbage.MANY, passes)
    """
    )
    assert out.splitlines() == ["True []", "True []", "True [2]"]


def test_frozen_objects_stay_frozen() -> None:
    out = _run(
        """
    import gc
    from tpuflow import garbage

    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage.undisturbed():
        kept = [[] for _ in range(2 * garbage.MANY)]
    print(gc.get_freeze_count() >= frozen > 0)
    """
    )
    assert out.strip() == "True"


def test_compiling_leaves_no_cycles() -> None:
    """One of a kernel whose first tiles do not fit kept a whole graph until the next collection."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w + 1)

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    gc.collect()
    gc.disable()
    try:
        tpuflow.jit(f).program(x, x)
        kept = [x for x in _collected() if type(x).__module__.startswith("tpuflow")]
    finally:
        gc.enable()
    assert kept == []


def _collected() -> list[object]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
