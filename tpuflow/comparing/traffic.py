"""The bytes that an instruction of XLA:TPU's HLO moves, by memory space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.comparing.hlo import CUTS, STARTS, Array, Module, Op, Space
from tpuflow.comparing.windows import times_read


@dataclass(frozen=True, slots=True)
class Moved:
    """The bytes that one execution of an instruction moves, by memory space; `prefetched`: HBM bytes of asynchronous copies; `padding`:
    HBM bytes beside these, since layouts have whole tiles."""

    hbm: int = 0
    prefetched: int = 0
    vmem: int = 0
    cmem: int = 0
    smem: int = 0
    host: int = 0
    padding: int = 0


KEPT: Mapping[str, tuple[Space, ...]] = {
    "hbm": (Space.HBM,),
    "vmem": (Space.VMEM,),
    "cmem": (Space.CMEM,),
    "smem": (Space.SMEM, Space.SCALAR),
    "host": (Space.HOST,),
}
"""By the fields of `Moved`; semaphores carry no data."""


def moved(module: Module, computation: str, op: Op) -> Moved:
    """The bytes that an instruction moves. Where a fusion only slices an operand, or updates a slice of it in place, the slice counts; what
    the loops of a product read again counts each time."""
    if op.opcode in STARTS:
        return _started(op.results[0], op.results[1])
    if op.opcode.startswith("async-"):
        return _given(module, computation, op)
    if op.opcode.endswith(("-done", "-update")):
        return Moved()
    inside = _fused(op)
    times = {} if inside is None else times_read(module, computation, op, inside)
    read = [a for i, name in enumerate(op.operands) for a in _read(module, computation, op, i, name) for _ in range(times.get(i, 1))]
    return Moved(**_by_space([*read, *_written(module, op)]))


def _started(one: Array, other: Array) -> Moved:
    """An asynchronous copy: as many bytes as its smaller end has leave one memory and reach the other. Only the end in HBM or the host's
    memory is counted."""
    smaller = min(one, other, key=lambda array: array.bytes)
    ends = _by_space([replace(smaller, space=one.space), replace(smaller, space=other.space)])
    return Moved(prefetched=ends["hbm"], host=ends["host"], padding=ends["padding"])


def _given(module: Module, computation: str, op: Op) -> Moved:
    """What another core, a SparseCore, is given to do, where it gets its operands: these and its results; of a table from which rows are
    taken as much as they are, and of one to which rows are added as much as is read and written of it."""
    start = module.op(computation, op.operands[0]) if op.opcode == "async-update" else op
    operands = op.operands if start is op else op.operands[1:]
    inside = next((name for role, name in start.called if role == "calls"), None)
    if op.opcode == "async-done" or not operands or inside is None:
        return Moved()
    table, *others = [array for name in operands for array in module.op(computation, name).results]
    result, *more = next(o for o in module.computations[inside] if o.root).results
    what = start.scope.rpartition("/")[2]
    if what == "gather":
        table = _at_most(table, result.bytes)
    elif what.startswith("scatter") and others:
        rows = max(array.bytes for array in others)
        table, result = _at_most(table, rows), _at_most(result, rows)
    return Moved(**_by_space([table, *others, result, *more]))


def _at_most(array: Array, count: int) -> Array:
    return Array(count, array.space) if count < array.bytes else array


def _by_space(arrays: Sequence[Array]) -> dict[str, int]:
    found = {name: sum(a.bytes for a in arrays if a.space in spaces) for name, spaces in KEPT.items()}
    return found | {"padding": sum(a.padding for a in arrays if a.space in KEPT["hbm"])}


def _read(module: Module, computation: str, op: Op, place: int, name: str) -> list[Array]:
    whole = list(module.op(computation, name).results)
    if len(whole) != 1:
        return whole
    if op.opcode in CUTS:
        return [Array(op.results[0].bytes, whole[0].space)] if place == 0 else whole
    inside = _fused(op)
    if inside is None:
        return whole
    parameter = _parameters(module, inside)[place]
    users = module.users.get((inside, parameter.name), ())
    if all(u.opcode in CUTS and u.operands[0] == parameter.name for u in users):
        return [Array(sum(u.results[0].bytes for u in users), whole[0].space)]
    if all(_changes(u, parameter.name) for u in users):
        return []
    return whole


def _changes(op: Op, name: str) -> bool:
    """Whether an instruction changes a piece of `name`, the rest of which it does not look at."""
    return op.opcode == "dynamic-update-slice" and op.operands[0] == name and name not in op.operands[1:]


def _written(module: Module, op: Op) -> Sequence[Array]:
    inside = _fused(op)
    if inside is None or len(op.results) != 1:
        return op.results
    root = next(o for o in module.computations[inside] if o.root)
    if root.opcode != "dynamic-update-slice":
        return op.results
    piece = module.op(inside, root.operands[1])
    return [Array(sum(a.bytes for a in piece.results), op.results[0].space)]


def _fused(op: Op) -> str | None:
    return next((name for role, name in op.called if role == "calls"), None) if op.opcode == "fusion" else None


def _parameters(module: Module, computation: str) -> list[Op]:
    return sorted((o for o in module.computations[computation] if o.opcode == "parameter"), key=lambda o: o.number or 0)
