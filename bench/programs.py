"""Many programs under `tpuflow.jit` beside `jax.jit`: public training steps and single operations, in run time and first call.

`python -m bench.programs --json bench/results/programs.json` takes both in turn and prints medians, their ratios, the geometric mean and
the worst. jax.jit is as everybody has it: with XLA's own options. First calls are traced, compiled and run in this process, where both
have compiled something before; what JAX has traced of the program for one of them is forgotten before the other's. `--only WORD` runs
what has the word in its name. `bench.dispatch` has what a call itself costs, `bench.first_call` what a second process saves.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tpuflow
from bench.program_operations import OPERATIONS, Make
from bench.program_steps import STEPS
from bench.timing import call_seconds, machine

PROGRAMS: Mapping[str, Make] = {**STEPS, **OPERATIONS}
ROUNDS = 15
MEAN_LIMIT, WORST_LIMIT, FIRST_LIMIT = 1.0, 1.25, 1.3

SYSTEMS: Mapping[str, Callable[..., Any]] = {"tpuflow": tpuflow.jit, "jax": jax.jit}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One program: seconds of its first call and of one call afterwards, of both."""
    function, arguments = PROGRAMS[name]()
    arguments = jax.block_until_ready(jax.device_put(arguments))
    compiled, first = {}, {}
    for system, jit in SYSTEMS.items():
        compiled[system] = jit(lambda *given: function(*given))  # each its own: a trace is no gift to the other,
        jax.clear_caches()  # nor are those of jitted functions inside, as all of jax.numpy's are
        began = time.perf_counter()
        jax.block_until_ready(compiled[system](*arguments))
        first[system] = time.perf_counter() - began
    seconds = call_seconds({system: awaited(call, arguments) for system, call in compiled.items()}, "jax", rounds)
    return {
        "program": name, "kind": "step" if name in STEPS else "operation", "seconds": seconds, "first_seconds": first,
        "ratio": seconds["tpuflow"] / seconds["jax"], "first_ratio": first["tpuflow"] / first["jax"],
    }  # fmt: skip


def awaited(call: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """A call that waits for its results."""
    return lambda: jax.block_until_ready(call(*arguments))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say together, and which limits hold."""
    ratios, firsts = [row["ratio"] for row in rows], [row["first_ratio"] for row in rows]
    over = [row["program"] for row in rows if row["ratio"] > WORST_LIMIT]
    return {
        "programs": len(rows),
        "geometric_mean": statistics.geometric_mean(ratios),
        "first_geometric_mean": statistics.geometric_mean(firsts),
        "worst": max(rows, key=lambda row: row["ratio"])["program"],
        "worst_ratio": max(ratios),
        "over": over,
        "first_over": [row["program"] for row in rows if row["first_ratio"] > FIRST_LIMIT],
        "holds": statistics.geometric_mean(ratios) <= MEAN_LIMIT and not over,
    }


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    ours, other = (1e3 * row["seconds"][system] for system in SYSTEMS)
    first, first_other = (row["first_seconds"][system] for system in SYSTEMS)
    over = "  OVER" if row["ratio"] > WORST_LIMIT else ""
    times = f"{row['program']:26} {ours:10.3f} {other:10.3f} {row['ratio']:6.2f}"
    return f"{times} {first:8.2f} {first_other:7.2f} {row['first_ratio']:6.2f}{over}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="programs with one of these in their name")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of both [%(default)s]")
    args = parser.parse_args()
    chosen = [name for name in PROGRAMS if any(word in name for word in args.only)]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: no program has one of these in its name; there are {', '.join(PROGRAMS)}")
    for jit in SYSTEMS.values():
        jit(lambda x: x + 1)(jnp.zeros(4))
    print(f"{'program':26} {'tpuflow ms':>10} {'jax.jit ms':>10} {'ratio':>6} {'first s':>8} {'jax s':>7} {'ratio':>6}", flush=True)
    rows = []
    for name in chosen:
        rows.append(measure(name, args.rounds))
        print(line(rows[-1]), flush=True)
        jax.clear_caches()
        gc.collect()
    found = summary(rows)
    print(f"{found['programs']} programs: geometric mean {found['geometric_mean']:.2f} (limit {MEAN_LIMIT:g})")
    print(f"worst {found['worst_ratio']:.2f}, {found['worst']} (limit {WORST_LIMIT:g})")
    print(f"first calls: geometric mean {found['first_geometric_mean']:.2f}, over {FIRST_LIMIT:g} in {len(found['first_over'])}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "summary": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
