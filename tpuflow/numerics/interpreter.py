"""The interpreter that runs a jaxpr on the device operation by operation, and measures every floating-point result.

It runs the step's own primitives on the same types, so its results are those of the step that trains. Operations that only move elements
are not measured. It enters the bodies of `scan`, the branches of `cond`, called functions and `shard_map`s of one device, whose loops and
choices run on the host; a `while` loop, or a `shard_map` over several devices, is one operation, measured by its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuflow.jaxprs.bind import scan_parts
from tpuflow.jaxprs.calls import CALLS, called
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr, Literal, host_function, in_place_of, is_key, opened, scope_of, source_of
from tpuflow.jaxprs.walk import array_of, walk
from tpuflow.numerics import scopes
from tpuflow.numerics.measures import Counts, empty_counts, is_nonfinite, stacked, tally
from tpuflow.numerics.operations import Shards, run_operation
from tpuflow.numerics.underflows import nonzero_rule
from tpuflow.stages.staging import Target
from tpuflow.training.train_step import OPTIMIZER_SCOPE

MOVES = frozenset({
    "all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice",
    "gather", "name", "optimization_barrier", "pad", "ppermute", "pvary", "reshape", "rev", "select_and_gather_add",
    "select_n", "slice", "split", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip
GRADIENT_PATH = MOVES | {"add_any", "convert_element_type"}
"""The primitives that may stand between the operation that computes a parameter's gradient and the optimizer."""
ACTIVATION, ACTIVATION_GRADIENT, PARAMETER_GRADIENT, OPTIMIZER = "activation", "activation gradient", "parameter gradient", "optimizer"
TENSORS = {scopes.FORWARD: ACTIVATION, scopes.BACKWARD: ACTIVATION_GRADIENT, scopes.UPDATE: OPTIMIZER}
"""The kind of tensor that an operation of each phase computes, the gradients of parameters apart."""


@dataclass(frozen=True, slots=True)
class Site:
    """A measured operation. place: its number in program order; loop: that of the outermost loop around it, or its own without one."""

    place: int
    loop: int
    primitive: str
    phase: str
    tensor: str
    layer: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    thresholds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tracked:
    """A value of the jaxpr while it is interpreted. bad: an element is not finite, or was not in an operand that it was moved from."""

    value: Any
    bad: bool = False


ABSENT = Tracked(None)
"""A value in a branch that is not taken."""


@dataclass(slots=True)
class Measurements:
    """The measured operations in program order, and the figures of each, once for every time that it ran.

    `place`: the number of the next operation. Each trip of a loop has the same numbers.
    """

    sites: list[Site] = field(default_factory=list)
    counts: list[list[Counts]] = field(default_factory=list)
    place: int = 0

    def add(self, site: Site, counts: Counts) -> None:
        """The figures of the operation that comes next."""
        if site.place == len(self.sites):
            self.sites.append(site)
            self.counts.append([])
        self.counts[site.place].append(counts)
        self.place += 1

    def figures(self) -> list[Counts]:
        """The figures of every operation, with an axis of the times that it ran."""
        return [stacked(trips) for trips in self.counts]


@dataclass(frozen=True, slots=True)
class MeasuringInterpreter:
    """Interprets one jaxpr. `scope`, `source`, `loop` and `shards` are those of the calls, loops and `shard_map`s around it.

    `thresholds`: magnitudes, as bits, for the census of fp32 numbers in the backward pass. `trains`: whether there is a backward pass;
    without one every operation counts as forward. `runs`: False lists the operations without computing anything.
    """

    model: str
    target: Target
    thresholds: tuple[int, ...] = ()
    scope: str = ""
    source: str = ""
    loop: int | None = None
    shards: Shards | None = None
    trains: bool = True
    runs: bool = True
    measurements: Measurements = field(default_factory=Measurements)

    def run(self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Tracked], gradients: Sequence[bool]) -> list[Tracked]:
        """The results of a jaxpr; `gradients` says which of them are gradients of parameters."""
        made = gradient_vars(opened(jaxpr)[0], gradients)

        def step(equation: Equation, operands: list[Tracked]) -> list[Tracked]:
            scope = "/".join(filter(None, (self.scope, scope_of(equation))))
            at = replace(self, scope=scope, source=source_of(equation) or self.source)
            return at.step(equation, operands, [v in made for v in equation.outvars])

        # The settings of an equation inside of shards say so, and a shard_map of its own is put around each.
        around = in_place_of if self.shards is None else nullcontext
        return walk(jaxpr, operands, step, lambda atom, value: self.track(array_of(atom, value)), around)

    def step(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """One equation: run and measured, or the jaxpr inside of it interpreted."""
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            return self.run(called(equation), operands, gradients)
        if name == "scan" and params["length"]:
            return self._scan(equation, operands, gradients)
        if name == "cond" and params.get("branches_platforms") is None:
            return self._cond(equation, operands, gradients)
        if host_function(equation) is not None and not equation.outvars:
            return []  # the step itself makes the call
        if name == "shard_map" and params["mesh"].size == 1 and self.shards is None:
            return replace(self, shards=Shards.of(equation)).run(params["jaxpr"], operands, gradients)
        return self._operation(equation, operands, gradients)

    def _operation(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """Run one equation, and measure the results unless it only moves numbers."""
        values = [o.value for o in operands]
        results = run_operation(equation, values, self.target, self.shards) if self.runs else [None] * len(equation.outvars)
        if equation.primitive.name in MOVES:
            bad = any(o.bad for o in operands)
            return [Tracked(r, bad) for r in results]
        outputs = zip(results, equation.outvars, gradients, strict=True)
        return [self._measured(equation, operands, r, v.aval, gradient) for r, v, gradient in outputs]

    def _measured(self, equation: Equation, operands: list[Tracked], result: Any, aval: Any, gradient: bool) -> Tracked:
        """Measure one result, and add its figures."""
        if not is_float(aval):
            return Tracked(result)
        site = self._site(equation, aval, gradient=gradient)
        counts = self._tally(equation, operands, result, site.thresholds) if self.runs else empty_counts(site.thresholds)
        self.measurements.add(site, counts)
        return Tracked(result, bool(counts.nonfinite))

    def _tally(self, equation: Equation, operands: list[Tracked], result: Any, thresholds: Sequence[int]) -> Counts:
        values = [o.value for o in operands]
        rule = nonzero_rule(equation.primitive.name, values, result)
        recompute = partial(run_operation, equation, values, self.target, self.shards)
        nonzero = None if rule is None else partial(rule, values, recompute)
        return tally(result, nonzero, partial(_from_finite, result.shape, operands), thresholds)

    def _site(self, equation: Equation, aval: Any, *, gradient: bool) -> Site:
        layer, phase = scopes.place_of(self.scope, self.model)
        phase = phase if self.trains else scopes.FORWARD
        place, dtype, backward = self.measurements.place, str(aval.dtype), phase == scopes.BACKWARD
        return Site(
            place=place,
            loop=place if self.loop is None else self.loop,
            primitive=equation.primitive.name,
            phase=phase,
            tensor=PARAMETER_GRADIENT if gradient and backward else TENSORS[phase],
            layer=OPTIMIZER_SCOPE if phase == scopes.UPDATE else layer,
            source=self.source,
            dtype=dtype,
            shape=tuple(aval.shape),
            thresholds=self.thresholds if backward and dtype == "float32" else (),
        )

    def _scan(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """A `scan`, trip by trip; stacked results have the order of the stacked operands, also in a reversed scan."""
        p, first = equation.params, self.measurements.place
        consts, carry, taken = scan_parts(equation, operands)
        inside = replace(self, loop=first if self.loop is None else self.loop)
        trips = range(p["length"])
        made: list[list[Tracked]] = []
        for trip in reversed(trips) if p["reverse"] else trips:
            self.measurements.place = first
            pieces = [self.track(_piece(x.value, trip)) for x in taken] if self.runs else taken
            results = inside.run(p["jaxpr"], [*consts, *carry, *pieces], gradients)
            carry = results[: p["num_carry"]]
            made.append(results[p["num_carry"] :])
        in_order = made[::-1] if p["reverse"] else made
        return [*carry, *(self._stacked(column) for column in zip(*in_order, strict=True))]

    def _stacked(self, column: Sequence[Tracked]) -> Tracked:
        """The results of all trips as one array."""
        return Tracked(_joined([x.value for x in column]), any(x.bad for x in column)) if self.runs else ABSENT

    def _cond(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """A `cond`; the operations of branches that are not taken are listed, with empty figures."""
        index, *rest = operands
        branches = equation.params["branches"]
        chosen = int(np.clip(np.asarray(index.value), 0, len(branches) - 1)) if self.runs else None
        results: list[Tracked] = [ABSENT] * len(equation.outvars)
        for i, branch in enumerate(branches):
            if i == chosen:
                results = self.run(branch, rest, gradients)
            else:
                replace(self, runs=False).run(branch, [ABSENT] * len(rest), gradients)
        return results

    def track(self, value: Any) -> Tracked:
        """A value that no operation has been seen to compute."""
        if not self.runs:
            return ABSENT
        return Tracked(value, is_float(value) and bool(np.any(is_nonfinite(value))))


def is_float(x: Any) -> bool:
    """Whether the elements are floating-point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def gradient_vars(jaxpr: Jaxpr, gradients: Sequence[bool]) -> set[Any]:
    """The variables that hold gradients of parameters: results marked in `gradients`, and what they are moved, cast or added up from."""
    found = {v for v, yes in zip(jaxpr.outvars, gradients, strict=True) if yes and not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name in GRADIENT_PATH and any(v in found for v in equation.outvars):
            found.update(v for v in equation.invars if not isinstance(v, Literal))
    return found


def _piece(value: Any, trip: int) -> Any:
    """What one trip of a loop takes of an array, or of an array of random keys."""
    return value[trip] if is_key(value) else np.asarray(value)[trip, ...]


def _joined(values: Sequence[Any]) -> Any:
    """An array of what the trips of a loop make."""
    return jnp.stack(values) if is_key(values[0]) else np.stack([np.asarray(x) for x in values])


def _from_finite(shape: tuple[int, ...], operands: Sequence[Tracked]) -> Any:
    """Where a result of this shape was computed from finite operands: element by element if their shapes allow it, else everywhere or
    nowhere."""
    floats = [o for o in operands if is_float(o.value)]
    if any(o.value.shape not in ((), shape) for o in floats):
        return not any(o.bad for o in floats)
    mask = np.bool_(True)
    for o in floats:
        mask = mask & ~is_nonfinite(o.value)
    return mask
