"""The collectives of two compilations of a step: the bytes that each chip sends, and how many of them overlap with computation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tpuflow.comparing.hlo import STARTS, Module, Op
from tpuflow.device.timing.collectives import CollectiveRow
from tpuflow.device.timing.result import ProgramTime
from tpuflow.isa.collectives import KINDS

KIND_OF: Mapping[str, str] = {
    "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter", "all-gather": "all_gather", "all-to-all": "all_to_all",
    "collective-permute": "permute",
}  # fmt: skip
"""HLO opcode -> our name of the collective. Of an asynchronous pair the start is counted."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective, with all its executions. sent_bytes: what a chip sends; beside_bytes: the part that overlaps with computation.

    seconds, exposed_seconds: the modelled time that it takes, and that the chip waits for it; None for XLA:TPU's.
    """

    kind: str
    what: str
    scope: str
    source: str
    count: int
    sent_bytes: int
    beside_bytes: int
    seconds: float | None = None
    exposed_seconds: float | None = None


def own_collectives(time: ProgramTime) -> tuple[Sent, ...]:
    """The collectives of our Program of one step. The bytes that overlap are in proportion to the hidden part of its time."""
    return tuple(map(_own, time.collectives))


def _own(row: CollectiveRow) -> Sent:
    sent, hidden = row.count * row.sent_bytes, 1 - row.exposed_picoseconds / row.picoseconds if row.picoseconds else 0.0
    return Sent(
        row.kind, row.place, row.scope, row.source, round(row.count), round(sent), round(sent * hidden), row.seconds, row.exposed_seconds
    )


def vendor_collectives(module: Module) -> tuple[Sent, ...]:
    """The collectives of XLA:TPU's schedule. A pair of start and done is one collective, and so is a chain of fusions that continue one,
    loops included. It overlaps if the schedule has a computation between its first and its last instruction."""
    scheduled = list(module.scheduled())
    places: dict[tuple[str, str], list[int]] = {}
    found: dict[tuple[str, str], tuple[str, Op]] = {}
    for at, (computation, op, _) in enumerate(scheduled):
        for within, one in _inside(module, computation, op):
            key = ("chain", one.chain) if one.chain else (computation, op.name)
            places.setdefault(key, []).append(at)
            found.setdefault(key, (within, one))
        if op.opcode.endswith("-done") and (begun := (computation, op.operands[0])) in places:
            places[begun].append(at)
    return tuple(_sent(module, scheduled, places[key], *found[key]) for key in found)


def by_kind(collectives: Iterable[Sent]) -> dict[str, list[Sent]]:
    """Collectives of each kind, in order of the kinds."""
    found: dict[str, list[Sent]] = {kind: [] for kind in KINDS}
    for one in collectives:
        found[one.kind].append(one)
    return {kind: some for kind, some in found.items() if some}


def largest(collectives: Iterable[Sent], most: int) -> list[Sent]:
    """The `most` collectives that send most bytes."""
    return sorted(collectives, key=lambda one: -one.sent_bytes)[:most]


def _inside(module: Module, computation: str, op: Op) -> list[tuple[str, Op]]:
    """(computation, collective) of an instruction of the schedule, if it is one, or of the collectives in the fusion that it calls."""
    if _kind(op) is not None:
        return [(computation, op)]
    return [(name, one) for role, name in op.called if role == "calls" for one in module.computations[name] if _kind(one) is not None]


def _kind(op: Op) -> str | None:
    return KIND_OF.get(op.opcode.removesuffix("-start"))


def _sent(module: Module, scheduled: Sequence[tuple[str, Op, int]], places: Sequence[int], within: str, one: Op) -> Sent:
    _, outer, times = scheduled[places[0]]
    chips, kind = one.group or module.devices, _kind(one)
    assert kind is not None, "only collectives are counted"
    kind = "reduce_scatter" if kind == "all_reduce" and _scatters(module, within, one) else kind
    sent = times * KINDS[kind].sent_elems(_given_bytes(module, within, one), chips)
    between = any(_computes(op) for _, op, _ in scheduled[places[0] + 1 : places[-1]])
    return Sent(kind, outer.name, one.scope or outer.scope, one.source or outer.source, times, sent, sent if between else 0)


def _given_bytes(module: Module, computation: str, op: Op) -> int:
    """The bytes of a collective's operands on a chip; for an all-reduce into a narrower type, in that type."""
    given = [array.bytes for name in op.operands for array in module.op(computation, name).results]
    if _kind(op) == "all_reduce" and len(given) == len(op.results):
        given = [min(size, result.bytes) for size, result in zip(given, op.results, strict=True)]
    return sum(given)


def _scatters(module: Module, computation: str, op: Op) -> bool:
    """Whether an all-reduce in a fusion is followed by dynamic slices only, which is XLA:TPU's form of a reduce-scatter."""
    if computation == module.entry:
        return False
    users = module.users.get((computation, op.name), ())
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


def _computes(op: Op) -> bool:
    return _kind(op) is None and op.opcode not in STARTS and not op.opcode.endswith(("-done", "-update", "-start"))
