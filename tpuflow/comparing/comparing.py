"""`tpuflow.compare`: one step, compiled by tpuflow and by XLA:TPU for the same chip or mesh of chips, compared layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tpuflow import amp
from tpuflow.chips import Chip, get_chip
from tpuflow.comparing import vendor
from tpuflow.comparing.collectives import own_collectives, vendor_collectives
from tpuflow.comparing.comparison import Comparison, KernelCosts, LayerRow, Side, Work, total
from tpuflow.comparing.hlo import STARTS, Module, Op
from tpuflow.comparing.traffic import moved
from tpuflow.data.batching import as_batch
from tpuflow.errors import ConfigError
from tpuflow.estimating.estimating import Estimate, estimate, estimate_training
from tpuflow.estimating.targets import load_step
from tpuflow.isa.liveness import touched
from tpuflow.isa.program import Kernel, Port, Program, walk
from tpuflow.reports.layers import BACKWARD, FORWARD, layer_of
from tpuflow.reports.profile import OUTSIDE, KernelLine, place_in
from tpuflow.training.adapters.choosing import is_model
from tpuflow.training.config import StepConfig
from tpuflow.training.preparing import make_recipe, state_shapes

Place = tuple[str, str]
"""A layer and a phase."""


def compare(step: Any, *args: Any, chip: str | Chip = "tpu-v5e", policy: str | amp.Policy | None = None, **kwargs: Any) -> Comparison:
    """One step as our compiler and as XLA:TPU's compile it for one chip: HBM bytes, memory, kernels and the time of products, by layer.

    XLA:TPU comes out of the package libtpu, which the user installs and which needs no TPU. It compiles for one device, which of some
    generations is one core, half of a chip: bytes and memory compare, and the time of products is of that device. A step on several chips
    is compiled for a slice of as many devices, its state and batch cut as our Program has them cut; then what each chip sends is compared,
    too, and what of that goes on beside computation.

    Args:
      step: a function of arrays, or a model, which is trained, as for `tpuflow.check`.
      args: of a function, its arguments; of a model, one batch. Arrays or `jax.ShapeDtypeStruct`s: nothing is run.
      chip: a row of the catalogue that XLA:TPU knows: tpu-v2 to tpu-v7x.
      policy: precision; as the function is written if None, "fp32" for a model.
      kwargs: of a function, its arguments; of a model, options of `tpuflow.estimate_training`: optimizer, loss, ...

    Raises:
      ConfigError: libtpu is not installed, does not know the chip, or does not compile the step.
      UnsupportedPrimitiveError, OutOfMemoryError: as compiling does.
    """
    row = get_chip(chip)
    vendor.topology_of(row)
    if not is_model(step):
        if not callable(step):
            raise ConfigError(f"compare: expected a function or a model, got {type(step).__name__}.")
        ours = estimate(step, *args, chip=row, policy=policy, **kwargs)
        fun = step if policy is None else amp.autocast(step, policy)
        placed = _placed(ours.program, ours.program.inputs, ours.program.outputs)
        theirs = vendor.compile_ahead(lambda given, named: fun(*given, **named), _shapes((args, kwargs)), row, placed)
    else:
        if len(args) != 1:
            raise ConfigError(
                f"compare: {type(step).__name__} is a model, which is trained: expected one batch, got {len(args)} arguments."
            )
        options = {**kwargs, "chip": row, "policy": policy or "fp32"}
        ours = estimate_training(step, args[0], **options, sink_size=1)
        program = ours.program
        _, *carried = program.inputs  # the first says how many trips
        placed = _placed(program, (*carried, *program.infeeds), (*program.outputs, *program.outfeeds[len(program.calls) :]))
        theirs = vendor_training(StepConfig(step, args[0], **options), row, placed)
    return compared(ours, theirs)


def compare_target(target: str, batch: int, chip: str, policy: str | None, **several_chips: Any) -> Comparison:
    """The comparison of what "module:function" or "file.py:function" gives for a batch size.

    several_chips: `mesh` and `sharding` of a training, where they are to be others than the target says.

    Raises:
      ConfigError: as `compare`, or there is no such function, or it gives something else.
    """
    made = load_step(target, batch)
    chosen = made.options.get("policy") if policy is None else policy
    return compare(made.step, *made.arguments, **{**made.on_chips(target, several_chips), "chip": chip, "policy": chosen})


def compared(ours: Estimate, theirs: vendor.Compiled) -> Comparison:
    """Both sides layer by layer, the largest difference of HBM bytes first."""
    kernels = ours.profile().kernels
    own = _by_place([*_own_work(kernels, ours.chip), *_own_copies(kernels, ours)])
    other = _by_place(_vendor_work(theirs.module, ours.chip))
    rows = [LayerRow(*place, tuple(own.get(place, ())), tuple(other.get(place, ()))) for place in dict.fromkeys([*own, *other])]
    memory = ours.memory
    return Comparison(
        name=ours.name,
        chip=ours.chip.name,
        policy=ours.policy,
        devices_a_chip=theirs.topology.devices_a_chip,
        uncounted=theirs.module.uncounted,
        ours=Side(
            memory.argument_size_in_bytes, memory.temp_size_in_bytes, total(w for r in rows for w in r.ours), own_collectives(ours.time)
        ),
        theirs=Side(theirs.argument_bytes, theirs.temp_bytes, total(w for r in rows for w in r.theirs), vendor_collectives(theirs.module)),
        layers=tuple(sorted(rows, key=lambda row: -abs(row.difference))),
        mesh={axis.name: axis.size for axis in ours.program.mesh},
    )


def vendor_training(config: StepConfig, chip: Chip, placed: vendor.Placed = vendor.ONE_DEVICE) -> vendor.Compiled:
    """The training step that `tpuflow.train` would run, its state donated, as XLA:TPU compiles it.

    Raises:
      ConfigError: as `compare`.
    """
    batch = as_batch(config.data)
    recipe, state = state_shapes(make_recipe(config, batch)[0], batch)
    return vendor.compile_ahead(recipe.train_step, (state, _shapes(batch)), chip, placed, donate_argnums=(0,))


def vendor_costs(theirs: vendor.Compiled, chip: Chip) -> KernelCosts:
    """What all of it costs."""
    return total(work for _, work in _vendor_work(theirs.module, chip))


def _placed(program: Program, arguments: Sequence[Port], results: Sequence[Port]) -> vendor.Placed:
    """The shardings of a Program's ports over its mesh, by the names of axes."""
    if not program.mesh:
        return vendor.ONE_DEVICE
    cuts = [
        tuple(tuple(tuple(program.mesh[a].name for a in axes) for axes in port.cut) for port in ports) for ports in (arguments, results)
    ]
    return vendor.Placed({axis.name: axis.size for axis in program.mesh}, *cuts)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, tree)


def _by_place(work: Iterable[tuple[Place, Work]]) -> Mapping[Place, list[Work]]:
    found: dict[Place, list[Work]] = {}
    for place, one in work:
        found.setdefault(place, []).append(one)
    return found


def _own_work(kernels: Sequence[KernelLine], chip: Chip) -> list[tuple[Place, Work]]:
    """Of one step in a launch of its own, so that kernels and bytes are whole numbers."""
    found: list[tuple[Place, Work]] = []
    for k in kernels:
        kept = {f"{chip.array_space}_bytes": round(k.resident_bytes)} if chip.array_space else {}
        costs = KernelCosts(round(k.count), round(k.hbm_bytes), product_seconds=k.seconds if k.macs else 0.0, **kept)
        found.append(((k.layer, k.phase), Work(k.what, k.source, costs)))
    return found


def _own_copies(kernels: Sequence[KernelLine], ours: Estimate) -> Iterator[tuple[Place, Work]]:
    """Copies between HBM and the chip or the host, each in the layer of the first kernel on what it moves."""
    blocks, lines = dict(walk(ours.program.code)), {k.place: k for k in kernels}
    first: dict[int, KernelLine] = {}
    for place, block in blocks.items():
        if isinstance(block, Kernel):
            for buffer, _ in touched(block):
                first.setdefault(buffer, lines[place])
    for row in ours.time.copies:
        copy: Any = blocks[row.place]
        ends = sorted((copy.source, copy.target), key=lambda buffer: ours.program.buffers[buffer].space == "hbm")
        line = next((first[buffer] for buffer in ends if buffer in first), None)
        moved = row.count * row.bytes
        costs = KernelCosts(hbm_bytes=moved, prefetched_bytes=moved, host_bytes=moved if row.is_host else 0)
        place = (OUTSIDE, FORWARD) if line is None else (line.layer, line.phase)
        yield place, Work(f"copy {' to '.join(row.ends)}", "" if line is None else line.source, costs)


def _vendor_work(module: Module, chip: Chip) -> list[tuple[Place, Work]]:
    """A row for every instruction that the device runs. A copy between memories belongs to the layer of its reader, or else of its
    operand."""
    scheduled = list(module.scheduled())
    scopes = [_scope_of(module, computation, op) for computation, op, _ in scheduled]
    trains = any(layer_of(scope).phase == BACKWARD for scope in scopes)
    found: list[tuple[Place, Work]] = []
    for (computation, op, times), scope in zip(scheduled, scopes, strict=True):
        if op.opcode.endswith("-done"):
            continue
        layer, each = place_in(scope, trains=trains), moved(module, computation, op)
        costs = KernelCosts(
            kernels=0 if op.opcode in STARTS or op.opcode == "async-update" else times,
            hbm_bytes=times * (each.hbm + each.prefetched),
            prefetched_bytes=times * each.prefetched,
            vmem_bytes=times * each.vmem,
            cmem_bytes=times * each.cmem,
            smem_bytes=times * each.smem,
            host_bytes=times * each.host,
            padding_bytes=times * each.padding,
            product_seconds=times * (op.cycles or 0) / chip.clock_hz,
        )
        found.append(((layer.path or OUTSIDE, layer.phase), Work(op.name, op.source, costs)))
    return found


def _scope_of(module: Module, computation: str, op: Op) -> str:
    """The name stack of an instruction, without the primitive at its end; without one, that of the nearest reader or else operand."""
    return _named(module, computation, op, _readers) or _named(module, computation, op, _read)


def _named(module: Module, computation: str, op: Op, beside: Callable[[Module, str, Op], Sequence[Op]]) -> str:
    seen, waiting = {op.name}, [op]
    while waiting:
        one = waiting.pop(0)
        if "/" in one.scope:
            return one.scope.rpartition("/")[0]
        near = [other for other in beside(module, computation, one) if other.name not in seen]
        seen.update(other.name for other in near)
        waiting += near
    return ""


def _readers(module: Module, computation: str, op: Op) -> Sequence[Op]:
    return module.users.get((computation, op.name), ())


def _read(module: Module, computation: str, op: Op) -> Sequence[Op]:
    return [module.op(computation, name) for name in op.operands]
