"""The fast engine: a verified Program translated to XLA:CPU executables (one, if it has neither a long loop nor long straight code),
compiled once for each code hash and outfeed capacity."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from tpuflow.device.budget import Budget
from tpuflow.device.fast.copies import read_at_home
from tpuflow.device.fast.cuts import Cuts, HostLoop, Segment, Stage
from tpuflow.device.fast.execution import Counting, Execution, Pace, open_outfeed
from tpuflow.device.fast.host import DEFAULT, Host, Sizes
from tpuflow.device.fast.liveness import CALLED, WORK, Key
from tpuflow.device.fast.rewriting import with_replacements
from tpuflow.device.fast.stored_executables import CachedFunction
from tpuflow.device.fast.translate import Translation
from tpuflow.device.limits import occupied_bytes
from tpuflow.device.varying import NONE, Axes, cut_axes
from tpuflow.device.verify import verify
from tpuflow.isa.collectives import chips_of, sizes_of
from tpuflow.isa.file import code_hash
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Program
from tpuflow.jaxprs.compat import jits_nothing
from tpuflow.jaxprs.executables import can_keep
from tpuflow.jaxprs.foreign_calls import wait_at_exit
from tpuflow.jaxprs.persistent import kept_entries
from tpuflow.jaxprs.plugins import Launcher
from tpuflow.jaxprs.processes import peers

# Algebraic simplification would change results (`(x * 1.1) * 1.3`, `x / 3`, fp16 overflow that must stay infinite). Without it
# the reshape mover never comes to an end: it wraps every transpose in hundreds of others.
#
# Optimization barriers stay (the pass that takes them away is called cse_barrier_expander): XLA fuses nothing through them, and they take
# neither time nor a kernel. But XLA:CPU cannot have them in small loops, which it makes one function each unless small-while-loop-hoisting
# is off; a trip of a tiny loop then takes 50 ns instead of 30.
#
# Of YNNPACK's loops XLA:CPU is to take those of dots, natively also those of f32 sums that start from +0 (`lax_reduce.summed`), and of
# convolutions with small kernels (`YNNPACK_CONVOLUTIONS`). Its maxima and minima lose NaN, its sums the sign of -0.
#
# By default LLVM is to use half of AVX-512's width. The whole of it takes 0.87 of the time for a chain of special functions in f32, 0.7 in
# bf16, whose roundings are integer operations, 0.91 for a softmax, 0.97 for passes over float64 sums; what waits for memory is the same.
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
COMPILER_OPTIONS: dict[str, Any] = {
    "xla_disable_hlo_passes": "algsimp,reshape-mover,cse_barrier_expander,small-while-loop-hoisting",
    _YNNPACK: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}

NATIVE_OPTIONS = {
    "xla_disable_hlo_passes": f"{COMPILER_OPTIONS['xla_disable_hlo_passes']},tree_reduction_rewriter",
    _YNNPACK: f"{COMPILER_OPTIONS[_YNNPACK]},LIBRARY_FUSION_TYPE_REDUCE",
}
"""Further options of native executables. XLA:CPU's own loops sum rows in vectors, unless this pass first makes them reduce windows of 32
and write the results: sums of rows of 512 then take 1.3 times as long. `lax_reduce` makes windows itself where they pay. None of
YNNPACK's fusions has a maximum or minimum but those of softmaxes, whose NaN the sum shows (`softmaxes`): other reductions are those of
integers, elementwise ones are kept apart (`lax_elementwise`)."""

CACHED_ELEMS = 2**18
"""The elements of f32 of which half of a core's second-level cache is full."""
YNNPACK_CONVOLUTIONS = {_YNNPACK: f"{NATIVE_OPTIONS[_YNNPACK]},LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"}
"""Further options of native executables whose convolutions all have kernels of less than `CACHED_ELEMS`. YNNPACK's loops read images where
they lie and the kernel again and again, Eigen's gather patches of the images first: one of 3x3x64x64 takes two thirds of the time, but the
windows of 16x16x32x64 by which a gradient of weights convolves take twice the time. XLA has one choice for a whole executable."""

EXACT_OPTIONS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
"""Further options of bit-exact executables. The concurrency-optimized scheduler runs other work beside a float64 dot, and YNNPACK then runs
the dot on the one core that is left: the MLP's first product takes 1.2 ms instead of 0.6."""

LARGE_BYTES = 2**28
"""HBM in use from which on XLA schedules for the least memory, not for concurrency. The largest executable of a training step of Stable
Diffusion's UNet then takes 0.8 GB beside arguments and results, instead of 6.5 GB; ResNet-50 at batch 4 trains in 2.1 GB of host memory
instead of 2.5. No value depends on it."""
LEAST_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True, slots=True)
class Direct:
    """A Program that is one executable: `execute(arrays).consume_with_handlers(handlers)` are its outputs.

    order: of each array that it takes, the number of the Program's input that it is, or `ZERO`: it is `zero`.
    """

    execute: Callable[[list[Any]], Any]
    handlers: Sequence[Any]
    zero: Any
    order: Sequence[int]

    ZERO: ClassVar[int] = -1


class FastEngine:
    """Runs a Program as XLA:CPU executables, in "native" or "bitexact" fidelity, on JAX's default backend or a `host` of their own.

    With `keeps`, on JAX's default backend, they are taken from the persistent cache if there is one.
    """

    consumes = True
    """Whether a launch overwrites donated inputs, so that they are lost if it is interrupted."""

    def __init__(self, program: Program, *, fidelity: str = "native", verified: bool = False, host: Host = DEFAULT, keeps: bool = False):
        if not verified:
            verify(program)
        self.program, self.host = program, host
        self.translation = Translation(read_at_home(program), bitexact=fidelity == "bitexact", over=host.over)
        self._lanes = self.translation.lanes
        cuts = Cuts(self.translation.program, self.translation.liveness, self._lanes.divergent)
        self.segments = cuts.segments()
        self._waits = not cuts.short or host.over is not None or bool(program.functions)
        options: dict[str, Any] = (
            COMPILER_OPTIONS
            | (EXACT_OPTIONS if fidelity == "bitexact" else NATIVE_OPTIONS)
            | (YNNPACK_CONVOLUTIONS if fidelity == "native" and _are_cached(self.translation) else {})
            | (LEAST_MEMORY if chips_of(program.mesh) * occupied_bytes(program) >= LARGE_BYTES else {})
        )
        stages = _stages(self.segments)
        entries = kept_entries() if keeps and host is DEFAULT else None
        self._cached = host is DEFAULT and (entries is not None or len(stages) > 1) and can_keep()
        self._entries = entries if self._cached else None
        self._ahead = len(stages) > 1 and (self._cached or host.takes_compiled)
        """Whether executables are compiled side by side, before the first of them runs."""
        self._begun: set[tuple[int, int]] = set()
        self._stages = {
            id(s): _Executable(s, self.translation, options, host, functools.partial(self._jit, f"{fidelity} {number}"))
            for number, s in enumerate(stages)
        }
        places = {p.buffer: i for i, p in enumerate(program.inputs)}
        self._only = only = next(iter(self._stages.values()))
        self.short = cuts.short and len(self._stages) == 1 and not (program.infeeds or program.outfeeds or program.functions)
        """Whether a launch is a single short executable without infeeds, outfeeds and host calls: `once` runs it."""
        self._donated, self._kept = ([places[k] for k in keys if k in places] for keys in (only.donates, only.keeps))

    def _jit(self, identity: str, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes, results: Sequence[int]) -> Any:
        """The jitted function of a stage, from the persistent cache if there is one."""
        if not self._cached:
            return self.host.jit(function, options, sizes)
        identity = f"{self.code} {identity}" if self._entries is not None else identity
        return CachedFunction(function, options, sizes, self._entries, identity, results, self.translation.tiers)

    @functools.cached_property
    def code(self) -> str:
        """The hash of the Program's code."""
        return code_hash(self.program)

    def once(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a `short` Program, with half the host's overhead of `start`. On one chip they are not waited for.

        Raises:
          PeerError: a process of the computation does not answer any more.
        """
        if not self.program.mesh:
            return self._only_stage(inputs)
        with peers():
            outputs = self._only_stage(self._lanes.inputs(inputs, self.host))
        return self._lanes.outputs(self.host.waited(outputs), self.host)

    def _only_stage(self, inputs: Sequence[Any]) -> list[Any]:
        donated = _distinct(self.host, [inputs[i] for i in self._donated]) if self._donated else []
        return self._only.outputs(donated, [inputs[i] for i in self._kept])

    def direct(self, inputs: Sequence[Any]) -> Direct | None:
        """What `once` launches, for inputs that it has been called with; None if that is more than one executable that takes the Program's
        inputs and gives its outputs, or goes through more than JAX's dispatch."""
        if not self.short or self.program.mesh:
            return None
        launcher = self._only.launcher([inputs[i] for i in self._donated], [inputs[i] for i in self._kept])
        if launcher is None or not launcher.is_plain or len(launcher.handlers) != len(self.program.outputs):
            return None
        taken, zero = [Direct.ZERO, *self._donated, *self._kept], self._only.zero
        zero = zero if isinstance(zero, jax.Array) else jax.device_put(zero, launcher.device)
        return Direct(launcher.execute, launcher.handlers, zero, [taken[i] for i in launcher.kept])

    def start(
        self, inputs: Sequence[Any], infeeds: Sequence[Any], start: int, capacity: int, paces: dict[int, Pace], budget: Budget
    ) -> Execution:
        """Begin a run of the Program.

        inputs: one array a port; infeeds: one stacked array [items, ...] a port, read from item `start` on; capacity: the number of items
        that each outfeed port can take in each piece of the execution; paces: the measured times of the loops' trips, by stage, which the
        execution updates; budget: the limit on work. Donated inputs may be consumed.
        """
        inputs, feeds = self._lanes.inputs(inputs, self.host), self._lanes.infeeds([_some(x) for x in infeeds], self.host)
        donated = iter(_distinct(self.host, [x for x, p in zip(inputs, self.program.inputs, strict=True) if p.donated]))
        arrays: dict[Key, Any] = {p.buffer: next(donated) if p.donated else x for x, p in zip(inputs, self.program.inputs, strict=True)}
        arrays |= {("taken", p): np.int32(start) for p in range(len(self.program.infeeds))} | {
            WORK: np.int32(budget.start),
            CALLED: np.int32(0),
        }
        for port in range(len(self.program.outfeeds)):
            arrays |= open_outfeed(self.program, self._lanes, port, capacity, self.host)
        work = Counting(budget, self.translation.workload, start, tuple(x.shape[0] for x in infeeds))
        if self._ahead:
            self._compile_ahead(max([1, *(x.shape[0] for x in infeeds)]), capacity)
        prices = budget.array()

        def run(stage: Stage, trips: int, arrays: Mapping[Key, Any]) -> tuple[list[Any], dict[Key, Any]]:
            return self._run(stage, trips, arrays, feeds, prices)

        types = self.translation.handed_on
        return Execution(self.program, self.segments, arrays, work, capacity, run, paces, self._waits, self._lanes, self.host, types)

    def _run(
        self, stage: Stage, trips: int, arrays: Mapping[Key, Any], infeeds: Sequence[Any], budget: np.ndarray
    ) -> tuple[list[Any], dict[Key, Any]]:
        return self._stages[id(stage)](trips, arrays, infeeds, budget)

    def compile(self, infeed_items: int = 1, capacity: int = 1) -> None:
        """Translate and compile without running; the results are kept in the caches that the first launch of these shapes looks into."""
        if not self._ahead:
            for translated in self.translate(infeed_items, capacity):
                translated.compile()
            return
        self._compile_ahead(infeed_items, capacity)
        for executable in self._stages.values():
            if not executable.wait():
                executable.translate(self._feeds(infeed_items), capacity).compile()

    def _compile_ahead(self, infeed_items: int, capacity: int) -> None:
        """Translate all executables, and have other threads compile them; each is waited for when it is called."""
        if (infeed_items, capacity) in self._begun:
            return
        self._begun.add((infeed_items, capacity))
        pool = ThreadPoolExecutor(min(len(self._stages), os.cpu_count() or 1), "tpuflow compile")
        try:
            for executable, translated in zip(self._stages.values(), self.translate(infeed_items, capacity), strict=True):
                executable.coming.append(pool.submit(translated.compile))
        finally:
            pool.shutdown(wait=False)

    def translate(self, infeed_items: int = 1, capacity: int = 1) -> Iterator[Any]:
        """The executables in XLA's terms (`jax.stages.Lowered`), not compiled yet."""
        feeds = self._feeds(infeed_items)
        for executable in self._stages.values():
            yield executable.translate(feeds, capacity)

    def _feeds(self, items: int) -> list[Any]:
        """What to translate for: stacked items of every infeed."""
        cuts = [(cut_axes(p), p) for p in self.program.infeeds]
        shapes = [(*sizes_of(self.program.mesh, sorted(axes)), items, *p.shape) for axes, p in cuts]
        rows = zip(shapes, cuts, strict=True)
        return [self.host.spec(shape, p.dtype.numpy, self._lanes.partition(axes)) for shape, (axes, p) in rows]

    @functools.cached_property
    def tiers(self) -> dict[str, int]:
        """Tier of every kernel by its place in the program (filled by the first compile or launch)."""
        return self.translation.tiers


class _Executable:
    """A stage as a compiled XLA executable, called with the arrays of its keys."""

    __slots__ = ("_counts", "_host", "_ports", "_run", "_stage", "_translation", "coming", "donates", "keeps", "zero")

    def __init__(self, stage: Stage, translation: Translation, options: Mapping[str, str], host: Host, jit: Callable[..., Any]):
        self._stage, self._translation, self._host = stage, translation, host
        self.donates = [k for k in stage.takes if k in stage.donates]
        self.keeps = [k for k in stage.takes if k not in stage.donates]
        self._ports = [i for i, k in enumerate(self.donates) if not isinstance(k, int) and k[0] == "outfeed"]
        outputs = len(translation.program.outputs) if stage.final else 0
        self._run = jit(self._flat, options, self._sizes, (outputs, len(stage.gives), int(translation.calls_numpy)))
        self.zero = host.scalar(np.zeros((), np.int32))
        self.coming: list[Future[Any]] = []
        """Compilations that other threads have begun."""
        self._counts = WORK in stage.takes
        """Whether it counts work: else its `budget` argument is None, as its number of trips is if it is no loop."""

    def __call__(
        self, trips: int, arrays: Mapping[Key, Any], infeeds: Sequence[Any], budget: np.ndarray
    ) -> tuple[list[Any], dict[Key, Any]]:
        """Run the stage: (the Program's outputs if it is the final one, the arrays of its `gives`)."""
        donated, kept = _distinct(self._host, [arrays[k] for k in self.donates]), [arrays[k] for k in self.keeps]
        loops, counted = np.int32(trips) if self._stage.loop is not None else None, budget if self._counts else None
        outputs, given = self._launch(loops, donated, kept, infeeds, counted)
        return outputs, dict(zip(self._stage.gives, given, strict=True))

    def outputs(self, donated: list[Any], kept: list[Any]) -> list[Any]:
        """Run a stage that is the whole Program and counts no work: the Program's outputs."""
        return self._launch(None, donated, kept, [], None)[0]

    def _launch(self, *arguments: Any) -> tuple[list[Any], list[Any]]:
        """Launch as one executable even under `jax.disable_jit`, which is about the user's functions, not the device's arithmetic."""
        if self.coming:
            self.wait()
        if jits_nothing():
            with jax.disable_jit(False):
                outputs, given, done = self._run(self.zero, *arguments)
        else:
            outputs, given, done = self._run(self.zero, *arguments)
        for x in done:
            wait_at_exit(x)
        return outputs, given

    def wait(self) -> bool:
        """Wait for what other threads compile. Returns whether it is there: what failed there fails again where it is needed."""
        wait(self.coming)
        failed = any(future.exception() for future in self.coming)
        self.coming.clear()
        return not failed

    def launcher(self, donated: list[Any], kept: list[Any]) -> Launcher | None:
        """What launches a stage that is the whole Program for such arrays, without JAX's dispatch."""
        return self._host.launcher(self._run, self._sizes, (self.zero, None, donated, kept, [], None))

    def translate(self, feeds: Sequence[Any], capacity: int) -> Any:
        """Translate for arguments of these shapes."""
        scalar = self._spec_of((), np.int32)
        donated, kept = ([self._spec(k, capacity) for k in keys] for keys in (self.donates, self.keeps))
        budget = self._spec_of((2 + len(self._translation.workload.dynamic_loops),), np.int32) if self._counts else None
        return self._run.lower(scalar, scalar if self._stage.loop is not None else None, donated, kept, list(feeds), budget)

    def _spec(self, key: Key, capacity: int) -> jax.ShapeDtypeStruct:
        program, lanes = self._translation.program, self._translation.lanes
        if isinstance(key, int):
            return self._spec_of(lanes.shape(key, program.buffers[key].shape), self._translation.handed_on(key), lanes.axes(key))
        kind, port = key
        if kind != "outfeed":
            return self._spec_of((), np.int32)
        shape = lanes.shape(key, (capacity, *program.outfeeds[port].shape))
        return self._spec_of(shape, program.outfeeds[port].dtype.numpy, lanes.axes(key))

    def _spec_of(self, shape: tuple[int, ...], dtype: Any, axes: Axes = NONE) -> jax.ShapeDtypeStruct:
        return self._host.spec(shape, np.dtype(dtype), self._translation.lanes.partition(axes))

    def _sizes(self, zero: Any, trips: Any, donated: Sequence[Any], kept: Any, infeeds: Sequence[Any], budget: Any) -> Hashable:
        """The part of the arguments' shapes that can differ: the number of items of each infeed, the capacity of each outfeed."""
        return tuple([x.shape for x in infeeds] + [donated[i].shape for i in self._ports])

    def _flat(
        self, zero: Any, trips: Any, donated: list[Any], kept: list[Any], infeeds: list[Any], budget: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """(the Program's outputs, the arrays of `gives`, if it may call the host's arithmetic a number that tells when it is done)."""

        def run(zero: Any, trips: Any, donated: list[Any], kept: list[Any], infeeds: list[Any], budget: Any) -> Any:
            arrays = {**dict(zip(self.donates, donated, strict=True)), **dict(zip(self.keeps, kept, strict=True))}
            return *self._translation(self._stage, zero, trips, arrays, infeeds, budget), done(zero)

        def done(zero: Any) -> list[Any]:
            return [zero] if self._translation.calls_numpy else []

        program, lanes, none = self._translation.program, self._translation.lanes, NONE
        ins = (none, none, [*map(lanes.axes, self.donates)], [*map(lanes.axes, self.keeps)], [*map(cut_axes, program.infeeds)], none)
        outputs = [lanes.axes(p.buffer) for p in program.outputs] if self._stage.final else []
        outs = outputs, [*map(lanes.axes, self._stage.gives)], done(none)
        mapped = lanes.mapped(run, ins, outs)
        finders = self._translation.finders
        return (with_replacements(mapped, finders) if finders else mapped)(zero, trips, donated, kept, infeeds, budget)


def _stages(segments: Sequence[Segment]) -> list[Stage]:
    """Every stage, including those in the bodies of host loops."""
    found: list[Stage] = []
    for segment in segments:
        found += _stages(segment.body + segment.condition) if isinstance(segment, HostLoop) else [segment]
    return found


def _are_cached(translation: Translation) -> bool:
    """Whether the kernels of all convolutions are small enough to stay in a core's cache; one that is summed over chips is all chips'."""
    return all(
        math.prod(axis.whole for axis in i.b.axes) * translation.lanes.count(translation.summed.kernels.get(id(kernel), ())) < CACHED_ELEMS
        for kernel in translation.program.kernels()
        for i in kernel.instructions
        if isinstance(i, MatmulAccumulate) and i.pairs
    )


def _some(items: Any) -> Any:
    """The items of an infeed, at least one: XLA indexes into them before the engine finds that there was none."""
    return items if items.shape[0] else np.zeros((1, *items.shape[1:]), items.dtype)


def _distinct(host: Host, arrays: list[Any]) -> list[Any]:
    """The arrays with repeated ones copied: XLA takes ownership of each donated buffer, so no two arguments may share one."""
    seen: set[int] = set()
    return [host.copy(x) if id(x) in seen or seen.add(id(x)) else x for x in arrays]
