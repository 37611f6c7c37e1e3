"""A stage of a Program (`cuts`) as one traceable JAX function: buffers are arrays, blocks are XLA control flow, kernels are lifted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, assert_never

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from tpuflow.device.budget import Workload
from tpuflow.device.fast import liveness
from tpuflow.device.fast.arithmetic import LaxArithmetic, words
from tpuflow.device.fast.cuts import Stage
from tpuflow.device.fast.fourier import multiplies_roots, transforms
from tpuflow.device.fast.host_callback import call_host, call_host_for_each, types_of
from tpuflow.device.fast.kernel import translate_kernel
from tpuflow.device.fast.lane_by_lane import picked
from tpuflow.device.fast.lanes import Lanes
from tpuflow.device.fast.lax_rounding import materialized
from tpuflow.device.fast.liveness import ACTIVE, AGAIN, CALLED, WORK, Key, Liveness, Step
from tpuflow.device.fast.repeated_kernels import RepeatedKernels
from tpuflow.device.fast.rewriting import Finder
from tpuflow.device.fast.round_trips import round_trips, sorts_integers
from tpuflow.device.fast.shapes import covers
from tpuflow.device.fast.slices import dynamic_index_in_dim, dynamic_update_index_in_dim
from tpuflow.device.fast.summed import Summed, summed
from tpuflow.device.verify.footprint import cover, section_trips, store_box
from tpuflow.dtypes import BF16, F16, F32
from tpuflow.isa.collectives import KINDS, Await, Collective, Position, sizes_of
from tpuflow.isa.dma import Load, Store
from tpuflow.isa.instruction import Window
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Outfeed, Program, Switch, While, children, walk

COPIED_ELEMS = 2**16
"""Arrays so large are not to be copied before they are overwritten; copies of smaller ones take less time than it takes to avoid them."""


@dataclass
class Translation:
    """A Program made ready for tracing.

    over: the devices that share its mesh, if there are several. finders: of what is to be replaced in what is traced. tiers: fills with the
    tier of every kernel, by place, while it is traced. calls_numpy: whether there may be calls of `padded_product` in it.
    """

    program: Program
    bitexact: bool
    over: Mesh | None = None
    tiers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {id(b): place for place, b in walk(self.program.code)}
        self.workload = Workload(self.program)
        self.lanes = Lanes(self.program, self.over)
        self.summed = summed(self.program, self.lanes.within_divergent) if self.program.mesh and not self.bitexact else Summed({}, {})
        whole = {id(k): frozenset(_overwritten(k, self.program)) for k in self.program.kernels()}
        self.liveness = Liveness(whole, self.workload.numbers)
        self.packed = _packed(self.program, whole)
        self.picked = _picked(self.program)
        self.calls_numpy = any(
            isinstance(i, MatmulAccumulate) and i.bounds for k in self.program.distinct_kernels() for i in k.instructions
        )
        self.repeated = None if self.program.mesh or self.bitexact else RepeatedKernels(self.program)
        self.finders = () if self.program.mesh or self.program.functions or self.bitexact else _finders(self.program)

    def __call__(
        self, stage: Stage, zero: Any, trips: Any, arrays: Mapping[Key, Any], infeeds: Sequence[Any], budget: Any
    ) -> tuple[list[Any], list[Any]]:
        """Run a stage: zero is a run-time s32 0, trips how many of its loop's trips to run (None: it has no loop), arrays what the stage
        takes, as `handed_on` says; infeeds are stacked items, budget is `Budget.array()` (None: it counts nothing).

        Returns (the Program's outputs if it is the final stage, what the stage gives, likewise).
        """
        program = self.program
        ar = LaxArithmetic(self.bitexact, zero)
        env: dict[Any, Any] = {
            c.buffer: ar.hold(_constant(program, c.buffer, c.data), program.buffers[c.buffer].dtype) for c in program.constants
        }
        env.update({k: ar.given(x) for k, x in arrays.items()})
        run = _Run(self, ar, zero, list(map(words, infeeds)), budget)
        if stage.loop is not None:
            run.slice(stage.loop, env, stage.after, trips)
        else:
            run.blocks(stage.blocks, env, stage.after)

        def stored(key: Key) -> Any:
            if isinstance(key, int):
                return ar.store(run.buffer(env, key), program.buffers[key].dtype)
            kind, port = key
            return ar.store(env[key], program.outfeeds[port].dtype) if kind == "outfeed" else env[key]

        def given(key: Key) -> Any:
            if isinstance(key, int) and self.is_held(key):
                return ar.hold(run.buffer(env, key), program.buffers[key].dtype)
            return stored(key)

        return [stored(p.buffer) for p in program.outputs] if stage.final else [], [given(k) for k in stage.gives]

    def is_held(self, buffer: int) -> bool:
        """Whether stages hand it on as it is computed with, not in its own type."""
        return not self.bitexact and buffer not in self.packed and self.program.buffers[buffer].dtype in (BF16, F16)

    def handed_on(self, buffer: int) -> np.dtype[Any]:
        """The NumPy type in which stages hand on a buffer."""
        return np.dtype(np.float32) if self.is_held(buffer) else self.program.buffers[buffer].dtype.numpy


def _finders(program: Program) -> tuple[Finder, ...]:
    """Those that may find something: what is looked through is traced twice."""
    worth = ((multiplies_roots, transforms), (sorts_integers, round_trips))
    return tuple(finder for is_worth_it, finder in worth if is_worth_it(program))


def _overwritten(kernel: Kernel, program: Program) -> list[int]:
    """The buffers that a kernel's stores overwrite completely."""
    stores: dict[int, list[tuple[str, Window]]] = {}
    for name, section in kernel.sections:
        for i in section:
            if isinstance(i, Store):
                stores.setdefault(i.window.buffer, []).append((name, i.window))
    return [b for b, found in stores.items() if any(covers(kernel, w) for _, w in found) or _cover_together(kernel, found, program, b)]


def _packed(program: Program, whole: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The buffers that lie in their own types between trips and branches: those that outlive a launch, and those that are written piece by
    piece, of which there may be many times what is in use at once. Others lie as they are computed with."""
    parts = {b for k in program.kernels() for b in liveness.writes(k) - whole[id(k)]}
    return frozenset(parts.union(p.buffer for p in (*program.inputs, *program.outputs, *program.constants)))


def _picked(program: Program) -> frozenset[int]:
    """The buffers of which kernels only read parts that the run picks, such as rows of a table."""
    picked: dict[int, bool] = {}
    for kernel in program.kernels():
        for window in (i.window for i in kernel.instructions if isinstance(i, Load)):
            picked[window.buffer] = picked.get(window.buffer, True) and any(axis.register is not None for axis in window.axes)
    return frozenset(buffer for buffer, always in picked.items() if always)


def _cover_together(kernel: Kernel, stores: list[tuple[str, Window]], program: Program, buffer: int) -> bool:
    boxes = [store_box(window, section_trips(kernel, section)) for section, window in stores] if len(stores) > 1 else []
    return bool(boxes) and cover([box for box in boxes if box is not None], program.buffers[buffer].elems)


def _constant(program: Program, buffer: int, data: bytes) -> Any:
    b = program.buffers[buffer]
    return jnp.asarray(np.frombuffer(data, b.dtype.numpy).reshape(b.shape))


class _Run:
    """One pass over the blocks. `env` maps keys to arrays, and ("read", buffer) to an array and what the last kernel made that read it.
    `budget`: the limit on work, where it starts, the price of a trip of every loop that is counted."""

    def __init__(self, translation: Translation, ar: LaxArithmetic, zero: Any, infeeds: list[Any], budget: Any):
        self.t, self.ar, self.zero, self.infeeds, self.budget = translation, ar, zero, infeeds, budget
        self.program = translation.program
        self.resting: frozenset[int] = frozenset()
        self.overwritten = frozenset(p.buffer for p in translation.program.inputs if p.donated)
        self.started: list[tuple[Collective, Any]] = []  # and what is sent

    def buffer(self, env: dict[Any, Any], index: int) -> Any:
        """Content of a buffer; one that nothing wrote (zero elements, or partly stored so far) reads as zeros."""
        b = self.program.buffers[index]
        return env[index] if index in env else jnp.zeros(b.shape, self.ar.held_type(b.dtype))

    def blocks(self, code: tuple[Block, ...], env: dict[Any, Any], after: Set[int]) -> None:
        """Run blocks in order; buffers that are not needed any more leave `env`."""
        for step in self.t.liveness.steps(code, after):
            if self._receives(step.block):
                self._receive(env)
            self._block(step, env)
            for buffer in step.dead:
                env.pop(buffer, None)
        self._receive(env)

    def _block(self, step: Step, env: dict[Any, Any]) -> None:
        match block := step.block:
            case Kernel():
                self._kernel(block, env, step.read)
            case Infeed():
                item = env["taken", block.port]
                value = picked(self.infeeds[block.port], item)
                env[block.buffer] = value
                env["taken", block.port] = item + self._within(env)
            case Outfeed():
                item = env["sent", block.port]
                value = words(self.ar.store(self.buffer(env, block.buffer), self.program.buffers[block.buffer].dtype))
                value = self.t.lanes.first(value, self.t.lanes.axes(block.buffer) - self.t.lanes.axes(("outfeed", block.port)))
                env["outfeed", block.port] = dynamic_update_index_in_dim(env["outfeed", block.port], value, item, 0)
                env["sent", block.port] = item + 1
            case Loop():
                self._loop(block, env, step.after, env[block.trips])
            case While():
                self._while(block, env, step.after)
            case Switch():
                self._switch(block, env, step.after)
            case Position():
                env[block.buffer] = self.t.lanes.position(block.axis)
            case Collective():
                sent = self.ar.load(self.buffer(env, block.source), self.program.buffers[block.target].dtype)
                self.started.append((block, sent.reshape(-1)))
            case Copy():
                self._copy(block, env)
            case CallHost():
                self._call_host(block, env)
            case Await():
                pass
            case _:
                assert_never(block)

    def _kernel(self, kernel: Kernel, env: dict[Any, Any], read_later: Set[int]) -> None:
        read, written = liveness.reads(kernel), liveness.writes(kernel)
        touched = [b for b in self.t.liveness.uses(kernel).touched if b in env or b in read]
        arrays = {b: self.buffer(env, b) for b in touched}
        for b in read & written & self.overwritten & env.keys():
            source, results = env.get(("read", b), (None, ()))
            if source is env[b] and source.size >= COPIED_ELEMS:  # XLA copies what it may overwrite if it may be read later
                arrays[b] = materialized(source, results)
        hbm = {b: self.ar.take(array, self.program.buffers[b].dtype) for b, array in arrays.items()}
        if self.t.repeated is not None:
            new, tier = self.t.repeated.translate(kernel, hbm, self.ar, self.zero, self.resting, read_later)
        else:
            axes = self.t.summed.kernels.get(id(kernel))
            chips = None if axes is None else functools.partial(self.t.lanes.side_by_side, axes=axes)
            new, tier = translate_kernel(kernel, self.program.buffers, hbm, self.ar, self.resting, read_later, chips)
        results = [x for x in new.values() if x.size]
        env.update({("read", b): (env[b], results) for b in (read - written) & self.overwritten & env.keys()})
        env.update(new)
        self.t.tiers[self.t.places[id(kernel)]] = tier

    def _copy(self, c: Copy, env: dict[Any, Any]) -> None:
        """All at once when it is started: nobody looks at the target, or touches the source, before it is awaited."""
        array, source, target = self.buffer(env, c.source), *(self.program.buffers[n] for n in (c.source, c.target))
        if c.index < 0:
            env[c.target] = array if source.shape == target.shape else array.reshape(target.shape)
            return
        item = self.buffer(env, c.index).reshape(())
        if source.space == "host":
            env[c.target] = dynamic_index_in_dim(array, item, 0).reshape(target.shape)
        else:
            items = self.buffer(env, c.target)
            env[c.target] = dynamic_update_index_in_dim(items, array.reshape(target.shape[1:]), item, 0)

    def _receives(self, block: Block) -> bool:
        """Whether a block needs what was started to be there, by itself or in nested blocks. An `Await` alone does not: the later, the more
        collectives are one between devices."""
        if not self.started:
            return False
        touched = liveness.reads(block) | liveness.writes(block)
        return bool(children(block)) or any(c.target in touched for c, _ in self.started)

    def _receive(self, env: dict[Any, Any]) -> None:
        """What was started, all at once: nobody has looked at the targets, or touched the sources, since."""
        alike: dict[Any, list[tuple[Collective, Any]]] = {}
        for c, sent in self.started:
            summed, varying = c.source in self.t.summed.buffers, self.t.lanes.varying.buffers[c.source]
            alike.setdefault((c.axes, summed, varying - set(c.axes)), []).append((c, sent))
        self.started = []
        for (axes, summed, _), group in alike.items():
            collectives, sent = zip(*group, strict=True)
            for c, found in zip(collectives, (self._sums if summed else self._meant)(collectives, sent, axes), strict=True):
                target = self.program.buffers[c.target]
                own = found if KINDS[c.kind].alike else self.t.lanes.own(found, axes)
                env[c.target] = self.ar.hold(own.reshape(target.shape), target.dtype)

    def _meant(self, collectives: Sequence[Collective], sent: Sequence[Any], axes: Sequence[int]) -> list[Any]:
        """What is received over some axes, of what chips send."""
        sizes, buffers = sizes_of(self.program.mesh, axes), self.program.buffers
        rows = zip(collectives, self.t.lanes.gathered(sent, axes), strict=True)
        return [KINDS[c.kind].meaning(c, self.ar, row, sizes, buffers[c.target].dtype) for c, row in rows]

    def _sums(self, collectives: Sequence[Collective], sent: Sequence[Any], axes: Sequence[int]) -> list[Any]:
        """The same of what is the sum of one device's chips already."""
        totals = self.t.lanes.over_devices(sent, axes, lambda x, y: self.ar.binary("add", x, y, F32))
        chips = math.prod(sizes_of(self.program.mesh, axes))
        return [x if KINDS[c.kind].alike else x.reshape(chips, -1) for c, x in zip(collectives, totals, strict=True)]

    def _call_host(self, block: CallHost, env: dict[Any, Any]) -> None:
        buffers = self.program.buffers
        sent = [words(self.ar.store(self.buffer(env, s), buffers[s].dtype)) for s in block.sources]
        env[CALLED], *received = self._answers(block, env, sent)
        env.update({target: x.reshape(buffers[target].shape) for target, x in zip(block.targets, received, strict=True)})

    def _answers(self, block: CallHost, env: dict[Any, Any], sent: Sequence[Any]) -> list[Any]:
        """What a call's function returns to this chip, behind `env[CALLED]` after it."""
        function, lanes, every = self.program.functions[block.function], self.t.lanes, range(len(self.program.mesh))
        if not every:
            return call_host(function, env[CALLED], sent)
        called = lanes.greatest(env[CALLED], frozenset(every), here=True)
        if function.per_chip:
            calling = jnp.asarray(env.get(ACTIVE, True))
            calling, *rows = (lanes.side_by_side(x, every) for x in (calling, *sent))
            called, *found = call_host_for_each(function, called, calling, rows)
            return [called, *(lanes.own_here(x, every) for x in found)]
        first = [lanes.first(x, lanes.varying.buffers[s]) for s, x in zip(block.sources, sent, strict=True)]
        nothing = [called, *(jnp.zeros(t.shape, t.dtype) for t in types_of(function))]
        return lanes.on_first_device(functools.partial(call_host, function), nothing, called, first)

    def _values(self, keys: Sequence[Key], env: dict[Any, Any]) -> list[Any]:
        return [self._lying(k, self.buffer(env, k)) if isinstance(k, int) else env[k] for k in keys]

    def _lying(self, buffer: int, array: Any) -> Any:
        """An array as it lies between trips and branches."""
        lie = self.ar.rest if buffer in self.t.packed else self.ar.hold
        return lie(array, self.program.buffers[buffer].dtype)

    def _within(self, env: dict[Any, Any]) -> Any:
        """Whether the work done so far is within the limit."""
        return env[WORK] <= self.budget[0] if WORK in env else np.bool_(True)

    def _count(self, block: Loop | While, env: dict[Any, Any]) -> None:
        """Add what a trip of a loop costs, if only the run says how many there are."""
        numbers = self.t.workload.numbers.get(id(block))
        if numbers is not None:
            env[WORK] = env[WORK] + self.budget[2 + numbers[0]]

    def slice(self, block: Loop | While, env: dict[Any, Any], after: Set[int], trips: Any) -> None:
        """So many more trips of a loop, of a while at most so many."""
        env[AGAIN] = self._loop(block, env, after, trips) if isinstance(block, Loop) else self._while(block, env, after, trips)

    def _active(self, block: Block, env: dict[Any, Any], runs: Any) -> dict[Any, Any]:
        """Within what chips may not all run alike: whether this one does. As lanes they all run it, which nobody sees but the host."""
        if not self.program.functions or id(block) not in self.t.lanes.divergent:
            return {}
        return {ACTIVE: env.get(ACTIVE, True) & runs}

    def _agree(self, block: Block, env: dict[Any, Any]) -> None:
        """After what chips may not all have run alike: the work of the one that did most, of one device's within such a block; and one
        record of the calls of the host."""
        lanes = self.t.lanes
        if id(block) not in lanes.divergent:
            return
        if CALLED in env:
            env[CALLED] = lanes.greatest(env[CALLED], lanes.varying.decided[id(block)], here=True)
        if WORK in env:
            env[WORK] = lanes.greatest(env[WORK], lanes.varying.decided[id(block)], here=id(block) in lanes.within_divergent)

    def _loop(self, block: Loop, env: dict[Any, Any], after: Set[int], trips: Any) -> Any:
        need = self.t.liveness.at_head(block, after)

        def trip(here: dict[Any, Any]) -> Any:
            self._count(block, here)
            self.blocks(block.body, here, need)
            return np.bool_(True)

        return self._repeat(block, env, after, trips, trip)

    def _while(self, block: While, env: dict[Any, Any], after: Set[int], most: Any = None) -> Any:
        """A trip is the condition and, if it turns out true, the body: so each of them is translated once."""
        need = self.t.liveness.at_head(block, after)
        keys = self._carried(block, after)

        def body(here: dict[Any, Any], values: list[Any]) -> list[Any]:
            inside = {**here, **dict(zip(keys, values, strict=True)), **self._active(block, here, here[block.predicate])}
            self.blocks(block.body, inside, need)
            return self._values(keys, inside)

        def trip(here: dict[Any, Any]) -> Any:
            self._count(block, here)
            self.blocks(block.condition, here, need)
            again = self.buffer(here, block.predicate)
            values = lax.cond(again, lambda x: body(here, x), lambda x: x, self._values(keys, here))
            here.update(zip(keys, values, strict=True))
            return again

        return self._repeat(block, env, after, most, trip)

    def _carried(self, block: Loop | While, after: Set[int]) -> list[Key]:
        return [*self.t.liveness.carried(block, after), *self.t.liveness.uses(block).state()]

    def _repeat(self, block: Loop | While, env: dict[Any, Any], after: Set[int], most: Any, trip: Callable[[dict[Any, Any]], Any]) -> Any:
        """Trips of a loop, until `trip`, which changes the env it is given, says no, there were `most`, or the work is beyond the limit;
        what it said last."""
        keys = self._carried(block, after)
        self.overwritten |= {b for b in keys if isinstance(b, int)}
        self.resting |= {b for b in self.t.packed.intersection(keys) if self.program.buffers[b].dtype in (BF16, F16)}
        standing = self.t.liveness.uses(block).touched & env.keys() - keys - self.t.picked
        env.update({b: self.ar.take(env[b], self.program.buffers[b].dtype) for b in standing})  # once, not in every trip

        def inside(values: Sequence[Any]) -> dict[Any, Any]:
            return {**env, **dict(zip(keys, values, strict=True))}

        def more(carry: list[Any]) -> Any:
            number, again, *values = carry
            go_on = again & self._within(inside(values))
            return go_on if most is None else go_on & (number < most)

        def once(carry: list[Any]) -> list[Any]:
            number, _, *values = carry
            here = {**inside(values), **self._active(block, env, more(carry))}
            again = trip(here)
            return [number + 1, jnp.asarray(again), *self._values(keys, here)]

        _, again, *values = lax.while_loop(more, once, [jnp.zeros((), jnp.int32), jnp.ones((), jnp.bool_), *self._values(keys, env)])
        env.update(zip(keys, values, strict=True))
        self._agree(block, env)
        return again

    def _switch(self, block: Switch, env: dict[Any, Any], after: Set[int]) -> None:
        uses = self.t.liveness.uses(block)
        keys = [*sorted(uses.written & after), *uses.state()]

        def branch(number: int, code: tuple[Block, ...]) -> Any:
            def run(_: None) -> list[Any]:
                here = {**env, **self._active(block, env, index == number)}
                self.blocks(code, here, after)
                return self._values(keys, here)

            return run

        index = jnp.clip(env[block.index], 0, len(block.branches) - 1)
        env.update(zip(keys, lax.switch(index, [branch(*b) for b in enumerate(block.branches)], None), strict=True))
        self._agree(block, env)
