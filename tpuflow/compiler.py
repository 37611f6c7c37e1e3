"""The compiler: the one visible list of passes, and the way from a function or jaxpr to a Program."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from tpuflow.chips import Chip, get_chip
from tpuflow.dtypes import S32
from tpuflow.errors import CompileError, ConfigError, OutOfMemoryError, ProgramFileError
from tpuflow.garbage import undisturbed
from tpuflow.isa import file
from tpuflow.isa.calls import count
from tpuflow.isa.collectives import MeshAxis
from tpuflow.isa.program import Program
from tpuflow.jaxprs.compat import ClosedJaxpr, is_at_host, is_key, key_words, mesh_of
from tpuflow.jaxprs.partitioner import partition
from tpuflow.jaxprs.persistent import kept_entries, key_of
from tpuflow.jaxprs.shardings import Asked, asked_of, axes_of
from tpuflow.lower.assemble import Interface, Tilings, assemble, scheduled
from tpuflow.lower.graph.digest import NotDataError, digest
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.host_ports import with_fetches, with_host_ports
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls
from tpuflow.lower.located import located
from tpuflow.lower.memory import check_fits, plan_memory
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.carry_converted import CarryConverted
from tpuflow.lower.passes.convert_early import ConvertEarly
from tpuflow.lower.passes.fetch_ahead import FetchAhead
from tpuflow.lower.passes.fetch_items import FetchItems
from tpuflow.lower.passes.fold_moves import FoldMoves
from tpuflow.lower.passes.fuse import Fuse
from tpuflow.lower.passes.fuse_rows import FuseRows
from tpuflow.lower.passes.hoist_invariants import HoistInvariants
from tpuflow.lower.passes.join_products import JoinProducts
from tpuflow.lower.passes.join_small import JoinSmall
from tpuflow.lower.passes.keep_on_host import KeepOnHost
from tpuflow.lower.passes.merge_kernels import MergeKernels
from tpuflow.lower.passes.prefetch_from_host import PrefetchFromHost
from tpuflow.lower.passes.prune_carries import PruneCarries
from tpuflow.lower.passes.read_chosen import ReadChosen
from tpuflow.lower.passes.rematerialize import Rematerialize
from tpuflow.lower.passes.schedule import Schedule
from tpuflow.lower.passes.simplify import Simplify
from tpuflow.lower.passes.split_collectives import SplitCollectives
from tpuflow.lower.passes.split_epilogues import SplitEpilogues
from tpuflow.lower.passes.store_less import StoreLess
from tpuflow.lower.passes.sum_in_map import SumInMap
from tpuflow.lower.passes.sum_in_product import SumInProduct
from tpuflow.lower.passes.unit_seconds import total_bytes
from tpuflow.lower.passes.widen_after_reshape import WidenAfterReshape
from tpuflow.lower.residency import keep_on_chip
from tpuflow.lower.shards import WHOLE, Cuts, cut_ports, on_chips
from tpuflow.lower.stage_log import StageLog, Watch, is_shown

if TYPE_CHECKING:
    from tpuflow.lower.importers.stablehlo.importer import Imported

PIPELINE: tuple[Pass, ...] = (
    KeepOnHost(), FetchItems(), Simplify(), PruneCarries(), Simplify(), CarryConverted(), ConvertEarly(), ReadChosen(),
    FoldMoves(), WidenAfterReshape(), Fuse(), HoistInvariants(), Schedule(), SplitEpilogues(), MergeKernels(related=True), StoreLess(),
    SumInProduct(), FuseRows(), SumInMap(), MergeKernels(), Rematerialize(), JoinProducts(), FetchAhead(), JoinSmall(),
    SplitCollectives(), Schedule(), PrefetchFromHost(),
)  # fmt: skip
"""The passes of every compilation, in order; docs/architecture.md says what each does. `KeepOnHost` settles which arrays stay in the host's
memory, and `PrefetchFromHost` starts copies from it ahead of their readers. The passes before `Fuse` rewrite nodes of whole tensors.
`Fuse` makes kernels of them, and the passes after it move, merge, join and order kernels. `Simplify` runs again after `PruneCarries`, which
allows further simplifications; `MergeKernels` first merges kernels that read the same arrays, later any that lie side by side; and
`Schedule` runs once after fusion, and again when the kernels are final."""


def compile_function(
    function: Callable[..., Any], arguments: Sequence[Any], *, name: str = "", chip: str | Chip = "generic", donated: Sequence[bool] = ()
) -> Program:
    """The Program of a function of arrays (or trees of them), traced with the shapes and types of `arguments`.

    `donated` has one entry for each leaf of the arguments.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return compile_jaxpr(closed, name=name or getattr(function, "__name__", "function"), chip=chip, donated=donated)


@undisturbed()
def compile_jaxpr(
    closed_jaxpr: ClosedJaxpr,
    *,
    name: str,
    chip: str | Chip = "generic",
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    donated: Sequence[bool] = (),
    watch: Watch | None = None,
) -> Program:
    """The Program of a jaxpr: an input for each of its inputs, an output for each of its outputs; random keys as their u32 words.

    `donated` says of each input whether the Program may overwrite it (none, if empty). Types being weak is noted in the signature.
    `watch` is told every stage.

    Raises:
      UnsupportedPrimitiveError, UnsupportedDtypeError: something in the jaxpr that the device does not have.
      OutOfMemoryError, CompileError: it cannot be put on the chip.
      ConfigError: the chip is unknown, or `donated` does not fit the inputs.
    """
    if donated and len(donated) != len(closed_jaxpr.in_avals):
        raise ConfigError(f"{name}: {len(donated)} entries in donated for {len(closed_jaxpr.in_avals)} inputs; expected one each.")
    began = time.perf_counter()
    asked = asked_of(closed_jaxpr)
    if asked is None:
        graph, calls = lower_with_calls(closed_jaxpr, name, input_names=tuple(input_names), output_names=tuple(output_names))
        graph, mesh, cuts = _on_mesh(graph, closed_jaxpr)
    else:
        calls = ()
        graph, mesh, cuts = _partitioned(closed_jaxpr, asked, name, input_names, output_names)
    ins, outs = closed_jaxpr.in_avals, closed_jaxpr.out_avals
    interface = Interface(
        tuple(map(bool, donated)), _weak(ins), _weak(outs), _keys(ins), _keys(outs), calls=calls, mesh=mesh, input_cuts=cuts.inputs,
        output_cuts=cuts.outputs, host_inputs=_at_host(ins),
    )  # fmt: skip
    graph = with_host_ports(graph, interface.host_inputs, _at_host(outs))
    return compile_graph(graph, chip=chip, interface=interface, began=began, watch=watch)


@undisturbed()
def compile_stablehlo(
    module: bytes | str | Imported,
    *,
    name: str = "",
    chip: str | Chip = "generic",
    donated: Sequence[bool] | None = None,
    trusted: bool = False,
    watch: Watch | None = None,
) -> Program:
    """The Program of a StableHLO module's `main`, or of one that is imported already; the module, and `trusted`, as `lower_stablehlo` takes
    them.

    `donated` says of each argument whether the Program may overwrite it; None: what the module says. `watch` is told every stage.

    Raises:
      ModuleError: the bytes are no module, or damaged.
      UnsupportedPrimitiveError, UnsupportedDtypeError: something in the module that the device does not have.
      OutOfMemoryError, CompileError: it cannot be put on the chip.
      ConfigError: the chip is unknown, or `donated` does not fit the arguments.
    """
    from tpuflow.lower.importers.stablehlo.importer import Imported, lower_stablehlo  # which a jaxpr has no need of

    began = time.perf_counter()
    imported = module if isinstance(module, Imported) else lower_stablehlo(module, name, trusted=trusted)
    given = imported.donated if donated is None else tuple(map(bool, donated))
    if len(given) != len(imported.input_types):
        raise ConfigError(f"{imported.graph.name}: {len(given)} entries in donated for {len(imported.input_types)} arguments; one each.")
    cuts = imported.cuts
    interface = Interface(
        given, calls=imported.calls, mesh=imported.mesh, input_cuts=cuts.inputs, output_cuts=cuts.outputs, host_inputs=imported.host_inputs
    )
    graph = with_host_ports(imported.graph, imported.host_inputs, imported.host_outputs)
    return compile_graph(graph, chip=chip, interface=interface, began=began, watch=watch)


@undisturbed()
def compile_sink(
    closed_jaxpr: ClosedJaxpr,
    *,
    carries: int,
    invariants: int = 0,
    name: str = "sink",
    chip: str | Chip = "generic",
    carry_names: Sequence[str] = (),
    invariant_names: Sequence[str] = (),
    infeed_names: Sequence[str] = (),
    outfeed_names: Sequence[str] = (),
    host_carries: Sequence[bool] = (),
) -> Program:
    """The Program that runs a step as often as its first input, `trips` (s32[]), says: loop(trips) { infeed; step; outfeed }.

    The jaxpr maps (carries..., invariants..., batch...) to (new carries..., figures...). The Program's further inputs are the carries
    (donated) and the invariants (kept), its outputs the carries after the last step. Each batch leaf is taken from an infeed port of its
    own before every step, each figure sent to an outfeed port after it. Carries whose type is of the host's memory, and `host_carries`,
    are there between steps.

    Raises:
      CompileError: a new carry has another type than the old one.
      And what `compile_jaxpr` raises.
    """
    began = time.perf_counter()
    asked = asked_of(closed_jaxpr)
    if asked is None:
        step, calls = lower_with_calls(closed_jaxpr, name)
        _check_carries(step, carries, carry_names)
        step, mesh, cuts = _on_mesh(step, closed_jaxpr, carries)
    else:
        calls = ()
        _check_stay(name, asked, _named(carry_names, carries, "state"))
        step, mesh, cuts = _partitioned(closed_jaxpr, asked, name, carries=carries)
        _check_carries(step, carries, carry_names)
    ins, outs = closed_jaxpr.in_avals, closed_jaxpr.out_avals
    kept = carries + invariants
    there = [a or b for a, b in itertools.zip_longest(_at_host(ins[:carries]), host_carries, fillvalue=False)]
    host_inputs = (False, *there, *_at_host(ins[carries:kept]))
    step = with_host_ports(with_fetches(step, host_carries), outputs=there)
    graph = sink_graph(step, carries, invariants, carry_names, invariant_names, count(calls))
    interface = Interface(
        donated=(False, *(True,) * carries, *(False,) * invariants),
        weak_inputs=(False, *_weak(ins)[:kept]),
        weak_outputs=_weak(outs)[:carries],
        input_keys=("", *_keys(ins)[:kept]),
        output_keys=_keys(outs)[:carries],
        infeeds=tuple(infeed_names),
        outfeeds=tuple(outfeed_names),
        calls=calls,
        mesh=mesh,
        input_cuts=(WHOLE, *cuts.inputs[:kept]),
        output_cuts=cuts.outputs[:carries],
        infeed_cuts=cuts.inputs[kept:],
        outfeed_cuts=((WHOLE,) * count(calls) + cuts.outputs[carries:]),
        host_inputs=host_inputs,
    )
    return compile_graph(with_host_ports(graph, host_inputs), chip=chip, interface=interface, began=began)


@undisturbed()
def compile_graph(
    graph: Graph,
    *,
    chip: str | Chip = "generic",
    interface: Interface | None = None,
    began: float | None = None,
    passes: Sequence[Pass] | None = None,
    watch: Watch | None = None,
) -> Program:
    """The Program of a graph: passes (`PIPELINE`), memory planning, emission. `began`: when the work on it started, for the log.

    Where there is a persistent cache, and nobody looks at the stages, what another process has made of the graph is taken from it.
    """
    row, interface = get_chip(chip), interface or Interface()
    compiled = functools.partial(_compile_graph, graph, row, interface, began, passes, watch)
    looked_at = watch is not None or is_shown()
    return compiled() if looked_at or passes is not None or interface.calls else _kept(graph, row, interface, compiled)


def _kept(graph: Graph, chip: Chip, interface: Interface, compiled: Callable[[], Program]) -> Program:
    """The Program of a graph, from the persistent cache if there is one and it is there; else it is compiled, and kept there."""
    entries = kept_entries()
    if entries is None:
        return compiled()
    try:
        name = f"program-{key_of(digest(graph, chip, interface))}"
    except NotDataError:
        return compiled()
    if (data := entries.get(name)) is not None:
        try:
            return file.from_bytes(data, name=name)
        except ProgramFileError as problem:
            entries.discard(name, str(problem))
    program = compiled()
    entries.put(name, file.to_bytes(program))
    return program


def _compile_graph(
    graph: Graph, row: Chip, interface: Interface, began: float | None, passes: Sequence[Pass] | None, watch: Watch | None
) -> Program:
    log = StageLog.from_environment(graph.name, time.perf_counter() if began is None else began, watch)
    log.stage("import", graph)
    steps = PIPELINE if passes is None else tuple(passes)
    saving = tuple(step.saving_memory() for step in steps)
    try:
        return _compile_by(steps, graph, row, interface, log)
    except OutOfMemoryError as refused:
        if refused.needed_bytes is None or saving == steps or _argument_bytes(graph, interface) > row.available_hbm_bytes:
            raise
        log.note(f"needs {refused.needed_bytes:,} bytes of HBM, {row.available_hbm_bytes:,} are there: again, by passes that save memory")
    return _compile_by(saving, graph, row, interface, log)


def _argument_bytes(graph: Graph, interface: Interface) -> int:
    """The HBM that inputs take, whatever becomes of them."""
    at_host = set(itertools.compress(graph.inputs, interface.host_inputs))
    return total_bytes(v for v in graph.inputs if v not in at_host)


def _compile_by(steps: Sequence[Pass], graph: Graph, row: Chip, interface: Interface, log: StageLog) -> Program:
    """The Program that these passes make of a graph.

    Raises:
      OutOfMemoryError: it needs more HBM than there is, or a kernel more of another memory.
    """
    for step in steps:
        with located(step.name):
            graph = step.on(row, interface.mesh)(graph)
        log.stage(step.name, graph)
    with located("plan-memory"):
        plan = plan_memory(graph, row, interface.donated, interface.copies, interface.host_inputs)
    log.lap("plan-memory", str(plan.use))
    tilings: Tilings = {}
    with located("assemble"):
        program = assemble(graph, plan, row, interface, tilings)
    if log.shows:
        log.stage("kernels", scheduled(graph, tilings))
    with located("keep-on-chip"):
        program = keep_on_chip(program, plan.replaced)
    log.lap("keep-on-chip", f"{len(program.resident):6d} arrays stay on the chip")
    with located("plan-memory"):
        check_fits(plan, program)
    log.finish(graph, program)
    return program


def sink_graph(
    step: Graph, carries: int, invariants: int, carry_names: Sequence[str] = (), invariant_names: Sequence[str] = (), call_ports: int = 0
) -> Graph:
    """The loop around a step's graph; the step's own batch inputs become the results of infeed nodes.

    Figures leave by the outfeed ports after those that the step itself sends to.
    """
    kept, batch = step.inputs[: carries + invariants], step.inputs[carries + invariants :]
    figures = step.outputs[carries:]
    infeeds = [Node("infeed", (), (value,), MappingProxyType({"port": i})) for i, value in enumerate(batch)]
    outfeeds = [Node("outfeed", (value,), (), MappingProxyType({"port": i})) for i, value in enumerate(figures, call_ports)]
    body = Graph("step", kept, (*infeeds, *step.nodes, *outfeeds), (*step.outputs[:carries], *kept[carries:]))
    trips = Value(TensorType(S32), "trips")
    inputs = tuple(Value(v.type, v.name) for v in kept)
    results = tuple(Value(v.type) for v in kept)
    loop = Node("loop", (trips, *inputs), results, regions=(body,))
    names = (*_named(carry_names, carries, "state"), *_named(invariant_names, invariants, "invariant"))
    return Graph(step.name, (trips, *inputs), (loop,), results[:carries], ("trips", *names), names[:carries])


def _partitioned(
    closed_jaxpr: ClosedJaxpr,
    asked: Asked,
    name: str,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    *,
    carries: int = 0,
) -> tuple[Graph, tuple[MeshAxis, ...], Cuts]:
    """The graph that each chip of the jaxpr's mesh runs after XLA has partitioned it; the rest as of `_on_mesh`. The first `carries`
    inputs lie as the outputs that take their places in the next step."""
    found = partition(closed_jaxpr, asked.carrying(carries), name)
    if found.inputs[:carries] != found.outputs[:carries]:  # XLA has chosen: where a state lies after the first step, it stays
        found = partition(closed_jaxpr, asked.carrying(carries, found.outputs, found.mesh), name)
    from tpuflow.lower.importers.stablehlo.partitioned import lower_partitioned

    imported = lower_partitioned(found, name, input_names=input_names, output_names=output_names)
    return imported.graph, imported.mesh, imported.cuts


def _on_mesh(graph: Graph, closed_jaxpr: ClosedJaxpr, carries: int = 0) -> tuple[Graph, tuple[MeshAxis, ...], Cuts]:
    """The graph for the chips of the jaxpr's mesh, whose axes of several chips are given back, and how its inputs and outputs are cut."""
    mesh = tuple(MeshAxis(name, size) for name, size in mesh_of(closed_jaxpr).items() if size > 1)
    if not mesh:
        return graph, (), Cuts((), ())
    graph, cuts = cut_ports(graph, carries)
    return on_chips(graph, mesh), mesh, cuts


def _named(names: Sequence[str], count: int, kind: str) -> tuple[str, ...]:
    return tuple(names[i] if i < len(names) else f"{kind} {i}" for i in range(count))


def _check_carries(step: Graph, carries: int, names: Sequence[str]) -> None:
    for i, name in enumerate(_named(names, carries, "state")):
        old, new = step.inputs[i].type, step.outputs[i].type
        if old != new:
            raise CompileError(
                f"{step.name}: the step turns {name!r} from {old} into {new}; a state keeps its shape and type from step to step. "
                f"Cast or reshape the new value, or make the initial one of the new type."
            )


def _check_stay(name: str, asked: Asked, carries: Sequence[str]) -> None:
    for carry, old, new in zip(carries, asked.inputs, asked.outputs, strict=False):
        if old is not None and new is not None and axes_of(old) != axes_of(new):
            raise CompileError(
                f"{name}: the step is given {carry!r} cut as {old.spec} and gives it back cut as {new.spec}; a state lies on the chips "
                "of a mesh as it did before. Give both the same sharding, or leave out one."
            )


def _weak(avals: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(bool(getattr(aval, "weak_type", False)) for aval in avals)


def _at_host(avals: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(map(is_at_host, avals))


def _keys(avals: Sequence[Any]) -> tuple[str, ...]:
    return tuple(key_words(aval)[0] if is_key(aval) else "" for aval in avals)


__all__ = [
    "PIPELINE",
    "compile_function",
    "compile_graph",
    "compile_jaxpr",
    "compile_sink",
    "compile_stablehlo",
    "sink_graph",
]
