"""The walk over a step's jaxpr that measures the result of every floating-point operation.

The step is run again equation by equation, with the same primitives on the same types: its own results are those of the step that trains.
Operations that only move numbers are not measured. Bodies of `scan`, branches of `cond`, called functions and shards are measured
inside; a `while` loop, whose trips are not known, by its results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.jaxprs.bind import bind_again, bind_scan, bind_shard_map, scan_parts
from tpuflow.jaxprs.calls import CALLS, called
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr, Literal, host_function, opened, scope_of, source_of
from tpuflow.jaxprs.walk import array_of, walk
from tpuflow.numerics import scopes
from tpuflow.numerics.measures import LARGE, NO_MAGNITUDE, NOT_RUN, Counts, encode, format_of, is_bad, tally
from tpuflow.numerics.underflows import ought_not_be_zero
from tpuflow.training.stepping import OPTIMIZER_SCOPE

MOVES = frozenset({
    "all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice",
    "gather", "name", "optimization_barrier", "pad", "ppermute", "pvary", "reshape", "rev", "select_and_gather_add",
    "select_n", "slice", "split", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip
ON_THE_WAY = MOVES | {"add_any", "convert_element_type"}
"""What may lie between the operation that makes a parameter's gradient and the gradient that the optimizer gets."""
ACTIVATION, ACTIVATION_GRADIENT, PARAMETER_GRADIENT, OPTIMIZER = "activation", "activation gradient", "parameter gradient", "optimizer"
TENSORS = {scopes.FORWARD: ACTIVATION, scopes.BACKWARD: ACTIVATION_GRADIENT, scopes.UPDATE: OPTIMIZER}
"""What an operation of each pass makes, the gradients of parameters aside."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a measured operation stands: its place in the program, and in it the outermost loop it is in (its own place if in none)."""

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
    """A value of the walk, and the values that tell whether it is finite: itself, or what it was moved together from."""

    value: Any
    sources: tuple[Any, ...] = ()

    def bad(self) -> Any:
        """Whether any element is not finite."""
        return functools.reduce(jnp.logical_or, [jnp.any(is_bad(x)) for x in self.sources], jnp.bool_(False))


@dataclass(frozen=True, slots=True)
class Walk:
    """One pass over one jaxpr. `scope`, `source`, `loop` and `trips`: of the calls and loops around it; `sites` and `found` grow together.

    `thresholds`: of the census of fp32 numbers in the backward pass, as bits. `trains`: whether there is a backward pass at all; without
    one everything is forward. `found` holds codes, and counts of those that are large.
    """

    model: str
    thresholds: tuple[int, ...] = ()
    scope: str = ""
    source: str = ""
    loop: int | None = None
    trips: int = 1
    places: int = 0
    trains: bool = True
    sites: list[Site] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)

    def run(self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Tracked], gradients: Sequence[bool]) -> list[Tracked]:
        """The results of a jaxpr; `gradients` says which of them are gradients of parameters."""
        made = gradient_vars(opened(jaxpr)[0], gradients)

        def step(equation: Equation, operands: list[Tracked]) -> list[Tracked]:
            scope = "/".join(filter(None, (self.scope, scope_of(equation))))
            at = replace(self, scope=scope, source=source_of(equation) or self.source)
            return at.step(equation, operands, [v in made for v in equation.outvars])

        return walk(jaxpr, operands, step, lambda atom, value: track(array_of(atom, value)))

    def step(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """One equation: measured, or walked into."""
        name = equation.primitive.name
        if name in CALLS:
            return self.run(called(equation), operands, gradients)
        if name == "scan" and equation.params["length"]:
            return self._scan(equation, operands, gradients)
        if name == "cond" and equation.params.get("branches_platforms") is None:
            return self._cond(equation, operands, gradients)
        if host_function(equation) is not None:
            return []  # told by the step itself
        if name == "shard_map":
            return self._shard_map(equation, operands, gradients)
        results = bind_again(equation, [o.value for o in operands])
        if name in MOVES:
            return [_moved(r, operands) for r in results]
        return [self._measured(equation, operands, r, gradient) for r, gradient in zip(results, gradients, strict=True)]

    def _measured(self, equation: Equation, operands: list[Tracked], result: Any, gradient: bool) -> Tracked:
        """Append the code of one result, or its figures."""
        if not is_float(result):
            return Tracked(result)
        code = encode(result, ought_not_be_zero(equation, [o.value for o in operands], result), _from_finite(result, operands))
        site = self._site(equation, result, gradient=gradient)
        self.sites.append(site)
        self.found.append(tally(code, format_of(result), site.thresholds, xp=jnp) if result.size * self.trips >= LARGE else code)
        return track(result)

    def _site(self, equation: Equation, result: Any, *, gradient: bool) -> Site:
        layer, phase = scopes.place_of(self.scope, self.model)
        phase = phase if self.trains else scopes.FORWARD
        place, dtype, backward = self.places + len(self.sites), str(result.dtype), phase == scopes.BACKWARD
        return Site(
            place=place,
            loop=place if self.loop is None else self.loop,
            primitive=equation.primitive.name,
            phase=phase,
            tensor=PARAMETER_GRADIENT if gradient and backward else TENSORS[phase],
            layer=OPTIMIZER_SCOPE if phase == scopes.UPDATE else layer,
            source=self.source,
            dtype=dtype,
            shape=tuple(result.shape),
            thresholds=self.thresholds if backward and dtype == "float32" else (),
        )

    def _inside(self, places: int = 0, trips: int | None = None) -> Walk:
        """A walk over a body that is traced by itself, `places` further on; what it finds is taken over afterwards."""
        here = self.places + len(self.sites) + places
        loop = here if trips is not None and self.loop is None else self.loop
        return replace(self, loop=loop, trips=self.trips * (1 if trips is None else trips), places=here, sites=[], found=[])

    def _scan(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """A counted loop: the figures of its body are stacked, a row a trip, in the order of the trips."""
        p = equation.params
        consts, carries, stacked = scan_parts(equation, operands)
        inside: list[Walk] = []

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            walk = self._inside(trips=p["length"])
            inside[:] = [walk]
            results = walk.run(p["jaxpr"], [*consts, *map(track, (*carry, *xs))], gradients)
            values = [r.value for r in results]
            return values[: len(carry)], (values[len(carry) :], walk.found)

        carry, (made, found) = bind_scan(equation, body, [o.value for o in carries], [o.value for o in stacked])
        found = jax.tree.map(lambda c: jnp.flip(c, 0), found) if p["reverse"] else found
        self._take_over(inside[0], found)
        return [track(v) for v in (*carry, *made)]

    def _cond(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """A choice: the figures of the branches that were not taken are those of nothing."""
        index, *rest = operands
        walks: dict[int, Walk] = {}

        def branch(i: int, *values: Any) -> tuple[list[Any], list[Any]]:
            walks[i] = self._inside(sum(len(walks[j].sites) for j in range(i)))
            results = walks[i].run(equation.params["branches"][i], [track(v) for v in values], gradients)
            return [r.value for r in results], walks[i].found

        values = [o.value for o in rest]
        branches = [functools.partial(branch, i) for i in range(len(equation.params["branches"]))]
        shapes = [jax.eval_shape(b, *values)[1] for b in branches]

        def whole(i: int, *values: Any) -> tuple[list[Any], list[list[Any]]]:
            results, own = branches[i](*values)
            return results, [own if j == i else list(map(nothing_like, shape)) for j, shape in enumerate(shapes)]

        results, found = jax.lax.switch(index.value, [functools.partial(whole, i) for i in range(len(branches))], *values)
        for i in range(len(branches)):
            self._take_over(walks[i], found[i])
        return [track(v) for v in results]

    def _shard_map(self, equation: Equation, operands: list[Tracked], gradients: list[bool]) -> list[Tracked]:
        """A program for every shard, of which there is one: its figures leave along an axis of size 1."""
        p, inside = equation.params, self._inside()

        def shard(*values: Any) -> tuple[list[Any], list[Any]]:
            results = inside.run(p["jaxpr"], [track(v) for v in values], gradients)
            return [r.value for r in results], jax.tree.map(lambda c: c[None], inside.found)

        out_specs = (list(p["out_specs"]), jax.P(p["mesh"].axis_names))
        results, found = bind_shard_map(equation, shard, [o.value for o in operands], out_specs)
        self._take_over(inside, jax.tree.map(lambda c: c[0], found))
        return [track(v) for v in results]

    def _take_over(self, walk: Walk, found: Sequence[Any]) -> None:
        self.sites.extend(walk.sites)
        self.found.extend(found)


def is_float(x: Any) -> bool:
    """Whether the elements are floating-point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def track(value: Any) -> Tracked:
    """A value by itself."""
    return Tracked(value, (value,) if is_float(value) else ())


def nothing_like(shape: Any) -> Any:
    """What a branch that was not taken finds, in the form of `shape`: figures of no numbers, or a code of `NOT_RUN`."""
    if isinstance(shape, Counts):
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        return zeros._replace(smallest=jnp.full(shape.smallest.shape, NO_MAGNITUDE, jnp.int32))
    return jnp.full(shape.shape, NOT_RUN, jnp.int32)


def gradient_vars(jaxpr: Jaxpr, gradients: Sequence[bool]) -> set[Any]:
    """The variables that are gradients of parameters: these results, and what they are moved, converted or added up from."""
    found = {v for v, yes in zip(jaxpr.outvars, gradients, strict=True) if yes and not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name in ON_THE_WAY and any(v in found for v in equation.outvars):
            found.update(v for v in equation.invars if not isinstance(v, Literal))
    return found


def _moved(result: Any, operands: Sequence[Tracked]) -> Tracked:
    """A result whose elements are some of the operands'."""
    return Tracked(result, tuple(x for o in operands for x in o.sources) if is_float(result) else ())


def _from_finite(result: Any, operands: Sequence[Tracked]) -> Any:
    """Where a result was computed from finite numbers: each element by itself where the operands line up with it, else all or none."""
    floats = [o for o in operands if is_float(o.value)]
    if all(o.value.shape in ((), result.shape) for o in floats):
        return functools.reduce(lambda mask, o: mask & ~is_bad(o.value), floats, jnp.bool_(True))
    return ~functools.reduce(jnp.logical_or, [o.bad() for o in floats])
