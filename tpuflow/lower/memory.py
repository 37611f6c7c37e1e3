"""Memory planning, of HBM and at the host: which values share a buffer, where copies are unavoidable, every buffer's address.

Values share a buffer when one takes another's place: the carries of a loop from trip to trip, what an update leaves of its operand,
an output and the donated input it replaces. They may where their lifetimes do not meet; elsewhere a copy is planned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.chips import Chip
from tpuflow.dtypes import DType
from tpuflow.errors import OutOfMemoryError
from tpuflow.isa.program import Buffer, Constant, Program
from tpuflow.lower.addresses import Request, aligned, assign
from tpuflow.lower.emit import overwritable
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.memories import at_host
from tpuflow.lower.lifetimes import FOREVER, Lifetimes, Span, lifetimes
from tpuflow.lower.memory_plan import Assignment, MemoryPlan, MemoryUse
from tpuflow.lower.out_of_memory import Held, out_of_memory_text


def plan_memory(
    graph: Graph, chip: Chip, donated: Sequence[bool] = (), copies: Sequence[int] = (), host_inputs: Sequence[bool] = ()
) -> MemoryPlan:
    """Plan the memory of a program. `donated` says of each input whether the program may overwrite it, `copies` on how many chips it is
    alike, `host_inputs` whether it is in the host's memory.

    Raises:
      OutOfMemoryError: the chip has too little HBM, whatever stays in VMEM.
    """
    donated = tuple(donated) or (False,) * len(graph.inputs)
    begun = tuple(v for v, there in zip(graph.inputs, host_inputs, strict=False) if there)
    planner = _Planner(graph, lifetimes(graph), donated, tuple(copies) or (1,) * len(graph.inputs), begun)
    plan = planner.plan()
    if plan.use.peak_bytes <= chip.available_hbm_bytes:
        return plan
    plan = replace(plan, overflowing=tuple(planner.live_at_peak()))
    if sum(h.bytes for h in plan.overflowing) - chip.resident_bytes > chip.available_hbm_bytes:
        raise _out_of_memory(graph.name, plan, plan.use.peak_bytes, chip)
    return plan


def check_fits(plan: MemoryPlan, program: Program) -> None:
    """Refuse a program that takes more HBM than there is, arrays in VMEM left out.

    Raises:
      OutOfMemoryError: says what takes most, and what would help.
    """
    peak_bytes = aligned(program.hbm_bytes)
    if peak_bytes > program.chip.available_hbm_bytes:
        raise _out_of_memory(program.name, plan, peak_bytes, program.chip)


def _out_of_memory(name: str, plan: MemoryPlan, peak_bytes: int, chip: Chip) -> OutOfMemoryError:
    use = replace(plan.use, peak_bytes=peak_bytes)
    return OutOfMemoryError(out_of_memory_text(name, use, peak_bytes, chip, plan.overflowing), peak_bytes)


@dataclass(slots=True, eq=False)
class _Place:
    """A buffer to be: the spans of all the values in it, its type, and what stands in it at the ends of the program.

    The shape is nominal (kernels use views of their own), unless the signature or a block asks for one: then it is `shaped`.
    """

    type: TensorType
    spans: list[Span]
    name: str = ""
    source: str = ""  # the user's line that makes it; of an argument none
    kept: bool = False  # a constant, or an input that is not donated: never written
    shaped: bool = False
    instead_of: _Place | None = None  # whose address it has, when what is there is over
    space: str = "hbm"  # or "host"
    input: int | None = None
    output: int | None = None
    data: bytes | None = None
    number: int = -1

    @property
    def ticks(self) -> Span:
        """First and last tick at which it is needed; whole ticks, so that what only just ends still has a place of its own."""
        return min(s for s, _ in self.spans) >> 1, max(e for _, e in self.spans) >> 1

    @property
    def first(self) -> _Place:
        """The first of those that have this address one after the other; its spans are those of all of them."""
        place = self
        while place.instead_of is not None:
            place = place.instead_of
        return place


_Move = tuple[_Place, _Place]


@dataclass(slots=True)
class _Copies:
    """Moves before and after nodes and at the end of regions."""

    before: dict[Node, list[_Move]] = field(default_factory=dict)
    after: dict[Node, list[_Move]] = field(default_factory=dict)
    at_end: dict[Graph, list[_Move]] = field(default_factory=dict)


def _meet(a: list[Span], b: list[Span]) -> bool:
    """Whether any span of a overlaps any of b (both sorted)."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][0] <= b[j][1] and b[j][0] <= a[i][1]:
            return True
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return False


@dataclass(slots=True)
class _Planner:
    graph: Graph
    lives: Lifetimes
    donated: tuple[bool, ...]
    copies: tuple[int, ...]
    begun_at_host: tuple[Value, ...] = ()
    places: dict[Value, _Place] = field(default_factory=dict)
    members: dict[_Place, list[Value]] = field(default_factory=dict)
    temporaries: list[_Place] = field(default_factory=list)
    replaced: list[_Move] = field(default_factory=list)

    def plan(self) -> MemoryPlan:
        self._open_places()
        for a, b in self.lives.same:
            self._merge(a, b, same=True)
        for a, b in self.lives.coalescing:
            self._merge(a, b)
        self._replace_donated()
        self._replace_temporaries()
        copies = _Copies()
        blocks = self._block_places(copies)
        outputs = self._outputs(copies)
        self._control_copies(copies)
        return self._numbered(outputs, blocks, copies)

    # --- sharing ----------------------------------------------------------------------------------------------------

    def _open_places(self) -> None:
        for value, spans in self.lives.spans.items():
            self._open(value, _Place(value.type, list(spans), value.name))
        for value in at_host(self.graph.nodes, self.begun_at_host):
            self.places[value].space = "host"
        for i, value in enumerate(self.graph.inputs):
            place = self.places[value]
            place.input, place.kept, place.shaped = i, not self.donated[i], True
            if place.kept:
                place.spans = [(0, FOREVER)]
        pool: dict[tuple[DType, bytes], Value] = {}
        for node in self.graph.walk():
            for value, maker in zip(node.results, _makers(node), strict=True):
                if value in self.places:
                    self.places[value].name = value.name or "/".join(filter(None, (maker.scope, maker.op)))
                    self.places[value].source = maker.source or node.source
            if node.op == "constant":
                self._constant(node, pool)

    def _open(self, value: Value, place: _Place) -> None:
        self.places[value] = place
        self.members[place] = [value]

    def _constant(self, node: Node, pool: dict[tuple[DType, bytes], Value]) -> None:
        data = node.attrs["data"].astype(node.result.dtype.numpy.newbyteorder("<"), copy=False).tobytes()
        place = self.places[node.result]
        place.kept, place.data = True, data
        self._merge(pool.setdefault((node.result.dtype, data), node.result), node.result, same=True)

    def _merge(self, a: Value, b: Value, *, same: bool = False) -> bool:
        """Let two values share a buffer if they can; `same` content always can."""
        one, two = self.places[a], self.places[b]
        if one is two:
            return True
        if not same and (one.kept or two.kept or not _alike(one, two) or _meet(one.spans, two.spans)):
            return False
        if two.input is not None or (one.input is None and two.data is not None):
            one, two = two, one
        one.spans = sorted(one.spans + two.spans)
        one.kept, one.data = one.kept or two.kept, one.data if one.data is not None else two.data
        one.name = one.name or two.name
        for value in self.members[two]:
            self.places[value] = one
        self.members[one] += self.members.pop(two)
        return True

    def _replace_donated(self) -> None:
        """Outputs take the place of donated inputs of their type: first of one they are computed from element by element."""
        taken = {id(self.places[v]) for v in self.graph.outputs}
        free: dict[TensorType, dict[Value, None]] = {}
        for v, given in zip(self.graph.inputs, self.donated, strict=True):
            if given and id(self.places[v]) not in taken:
                free.setdefault(v.type, {})[v] = None
        related: dict[Value, tuple[Value, ...]] = {}
        for node in self.graph.nodes:
            replaced = overwritable(node)
            related |= dict.fromkeys(node.results, tuple(v for v in node.inputs if v in replaced))
        for value in self.graph.outputs:
            if self.places[value].input is not None:
                continue
            alike = free.get(value.type, {})
            first = [v for v in related.get(value, ()) if v in alike]
            for candidate in [*first, *alike]:
                if self._merge(candidate, value):
                    del alike[candidate]
                    break

    def _replace_temporaries(self) -> None:
        """Results take the addresses of operands of their type that are over; places that inputs, outputs and blocks have are left alone.
        The two are buffers of their own, of which one may stay on the chip; where both are in HBM, they become one (`keep_on_chip`)."""
        fixed = {*self.graph.inputs, *self.graph.outputs, *(v for node in self.graph.walk() if (v := _block_value(node)) is not None)}
        taken = {id(self.places[v]) for v in fixed}
        for operand, result in self.lives.replacing:
            old, new = self.places[operand], self.places[result]
            one, two = old.first, new.first
            if taken.isdisjoint((id(old), id(new))) and one is not two and not _meet(one.spans, two.spans):
                one.spans, two.instead_of = sorted(one.spans + two.spans), one
                self.replaced.append((old, new))

    # --- copies -----------------------------------------------------------------------------------------------------

    def _block_places(self, copies: _Copies) -> dict[Node, _Place]:
        """The places that blocks read or write themselves; a copy where the value's own place has another shape."""
        found: dict[Node, _Place] = {}
        for node in self.graph.walk():
            value = _block_value(node)
            if value is None:
                continue
            place = self.places[value]
            if place.shaped and place.type.shape != value.shape:
                condition = node.regions[0] if node.op == "while" else None
                tick = self.lives.end[condition] if condition else self.lives.begin[node]
                own = self._spare(value.type, [(2 * tick, 2 * tick + 1)])
                if condition:
                    copies.at_end.setdefault(condition, []).append((place, own))
                elif node.op == "infeed":
                    copies.after[node] = [(own, place)]
                else:
                    copies.before[node] = [(place, own)]
                place = own
            place.type, place.shaped = value.type, True
            found[node] = place
        return found

    def _outputs(self, copies: _Copies) -> list[_Place]:
        """The place of every output, one each; copies to those that need a place of their own."""
        end = self.lives.end[self.graph]
        found: list[_Place] = []
        pending: list[_Move] = []
        for i, value in enumerate(self.graph.outputs):
            place = self.places[value]
            if place.kept or place.output is not None or (place.shaped and place.type.shape != value.shape):
                target = self._spare(value.type, [(2 * end + 1, FOREVER)], place.space)
                pending.append((place, target))
                place = target
            place.output, place.type, place.shaped = i, value.type, True
            found.append(place)
        copies.at_end[self.graph] = self._in_sequence(pending, end)
        return found

    def _control_copies(self, copies: _Copies) -> None:
        for node in self.graph.walk():
            if node.op in ("loop", "while"):
                body = node.regions[-1]
                carries = node.inputs[len(node.inputs) - len(body.inputs) :]
                copies.before.setdefault(node, []).extend(self._moves(carries, body.inputs, self.lives.begin[node]))
                copies.at_end.setdefault(body, []).extend(self._moves(body.outputs, body.inputs, self.lives.end[body]))
            elif node.op == "switch":
                for branch in node.regions:
                    copies.at_end.setdefault(branch, []).extend(self._moves(branch.outputs, node.results, self.lives.end[branch]))

    def _spare(self, type: TensorType, spans: list[Span], space: str = "hbm") -> _Place:
        """A place that belongs to no value of the graph."""
        place = _Place(type, spans, "copy", shaped=True, space=space)
        self.temporaries.append(place)
        return place

    def _moves(self, sources: Iterable[Value], targets: Iterable[Value], tick: int) -> list[_Move]:
        pairs = [(self.places[s], self.places[t]) for s, t in zip(sources, targets, strict=True)]
        return self._in_sequence([(s, t) for s, t in pairs if s is not t], tick)

    def _in_sequence(self, copies: list[_Move], tick: int) -> list[_Move]:
        """Copies meant to happen at once, in an order that gives the same: no source is overwritten early, cycles go over a spare, and what
        stays at the host goes over HBM."""
        pending, ordered = list(copies), []
        while pending:
            ready = next((c for c in pending if all(c[1] is not other[0] for other in pending if other is not c)), None)
            if ready is not None:
                pending.remove(ready)
                ordered += self._over_hbm(*ready, tick)
                continue
            saved = pending[0][1]
            spare = self._spare(saved.type, [(2 * tick, 2 * tick + 1)])
            ordered.append((saved, spare))
            pending = [(spare if s is saved else s, t) for s, t in pending]
        return ordered

    def _over_hbm(self, source: _Place, target: _Place, tick: int) -> list[_Move]:
        if source.space == target.space == "host":
            between = self._spare(source.type, [(2 * tick, 2 * tick + 1)])
            return [(source, between), (between, target)]
        return [(source, target)]

    # --- numbers ----------------------------------------------------------------------------------------------------

    def _numbered(self, outputs: list[_Place], blocks: Mapping[Node, _Place], copies: _Copies) -> MemoryPlan:
        places = self._all_places()
        firsts = [p for p in places if p.instead_of is None]
        addresses, peak_bytes = _assigned([p for p in firsts if p.space == "hbm"])
        addresses |= _assigned([p for p in firsts if p.space == "host"])[0]
        for number, place in enumerate(places):
            place.number = number

        def numbers(moves: list[_Move]) -> tuple[Assignment, ...]:
            return tuple(Assignment(source.number, target.number) for source, target in moves)

        return MemoryPlan(
            tuple(Buffer(p.type.dtype, p.type.shape, addresses[p.first], p.space) for p in places),
            tuple(self._name(p) for p in places),
            {value: place.number for value, place in self.places.items()},
            {node: place.number for node, place in blocks.items()},
            tuple(p.number for p in outputs),
            tuple(Constant(p.number, p.data) for p in places if p.data is not None),
            {node: numbers(moves) for node, moves in copies.before.items() if moves},
            {node: numbers(moves) for node, moves in copies.after.items() if moves},
            {region: numbers(moves) for region, moves in copies.at_end.items() if moves},
            self._use([p for p in firsts if p.space == "hbm"], peak_bytes),
            tuple((old.number, new.number) for old, new in self.replaced),
        )

    def _all_places(self) -> list[_Place]:
        """Those that may become one with the first at their address come last: the numbers of all others, ports among them, stay."""
        return sorted([*dict.fromkeys(self.places.values()), *self.temporaries], key=lambda place: place.instead_of is not None)

    def live_at_peak(self) -> list[Held]:
        """What HBM holds at the tick at which it holds most, largest first."""
        places = [p for p in self._all_places() if p.space == "hbm" and p.instead_of is None]
        change: Counter[int] = Counter()
        for p in places:
            begin, end = p.ticks
            change[begin] += p.type.elems * p.type.dtype.bytes
            change[end + 1] -= p.type.elems * p.type.dtype.bytes
        ticks = sorted(change)
        live = list(itertools.accumulate(change[t] for t in ticks))
        at = ticks[max(range(len(live)), key=live.__getitem__)]
        held = [
            Held(self._name(p), p.source, p.type, _purpose(p))
            if p.input is None
            else Held(self._name(p), "", p.type, _purpose(p), self.copies[p.input])
            for p in places
            if p.ticks[0] <= at <= p.ticks[1]
        ]
        return sorted(held, key=lambda h: -h.bytes)

    def _name(self, place: _Place) -> str:
        for at, names in ((place.input, self.graph.input_names), (place.output, self.graph.output_names)):
            if at is not None and at < len(names):
                return names[at]
        return place.name

    def _use(self, places: Iterable[_Place], peak_bytes: int) -> MemoryUse:
        sums: Counter[str] = Counter()
        for p in places:
            sums[_purpose(p)] += aligned(p.type.elems * p.type.dtype.bytes)
        return MemoryUse(peak_bytes, sums["donated"], sums["input"], sums["constant"], sums["output"])


def _assigned(places: Sequence[_Place]) -> tuple[dict[_Place, int], int]:
    """Addresses of places in one memory, and the bytes that they take of it."""
    addresses, end = assign([Request(p.type.elems * p.type.dtype.bytes, *p.ticks) for p in places])
    return dict(zip(places, addresses, strict=True)), end


def _makers(node: Node) -> Iterable[Node]:
    """What makes each result of a node: of a fused one, a node inside it."""
    if node.op != "fused":
        return (node,) * len(node.results)
    (region,) = node.regions
    made = {value: maker for inner in region.nodes for value, maker in zip(inner.results, _makers(inner), strict=True)}
    return [made.get(value, node) for value in region.outputs]


def _block_value(node: Node) -> Value | None:
    """The value that the block of a node reads or writes itself."""
    if node.op == "while":
        return node.regions[0].outputs[0]
    if node.op in ("loop", "switch", "outfeed"):
        return node.inputs[0]
    return node.result if node.op == "infeed" else None


def _purpose(place: _Place) -> str:
    if place.input is not None:
        return "input" if place.kept else "donated"
    return "constant" if place.data is not None else "output" if place.output is not None else ""


def _alike(a: _Place, b: _Place) -> bool:
    return (a.type.dtype, a.type.elems, a.space) == (b.type.dtype, b.type.elems, b.space)
