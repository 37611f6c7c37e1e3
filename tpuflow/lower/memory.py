"""HBM planning: which values share a buffer, where copies are unavoidable, and the address of every buffer.

Values share a buffer when one takes another's place: the carries of a loop from trip to trip, what an update leaves of its operand,
an output and the donated input it replaces. They may where their lifetimes do not meet; elsewhere a copy is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tpuflow.chips import Chip
from tpuflow.dtypes import DType
from tpuflow.errors import OutOfMemoryError
from tpuflow.isa.program import Buffer, Constant
from tpuflow.lower.addresses import Request, aligned, assign
from tpuflow.lower.emit import may_update_in_place
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.lifetimes import FOREVER, Lifetimes, Span, lifetimes


@dataclass(frozen=True, slots=True)
class Copy:
    """Buffer `target` = buffer `source`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of HBM by purpose, alignment included. `peak_bytes` is the highest address in use; temporaries share the rest of it."""

    peak_bytes: int
    donated_bytes: int
    input_bytes: int
    constant_bytes: int
    output_bytes: int

    @property
    def temporary_bytes(self) -> int:
        """What is neither input nor constant nor an output of its own."""
        return self.peak_bytes - self.donated_bytes - self.input_bytes - self.constant_bytes - self.output_bytes

    def __str__(self) -> str:
        parts = (
            ("donated inputs", self.donated_bytes), ("other inputs", self.input_bytes), ("constants", self.constant_bytes),
            ("outputs", self.output_bytes), ("temporaries", self.temporary_bytes),
        )  # fmt: skip
        return f"{self.peak_bytes:,} bytes of HBM ({', '.join(f'{name} {n:,}' for name, n in parts if n)})"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Buffers with addresses; the buffer of every value; copies before control nodes and at the end of regions, in order."""

    buffers: tuple[Buffer, ...]
    names: tuple[str, ...]
    buffer_of: Mapping[Value, int]
    outputs: tuple[int, ...]
    constants: tuple[Constant, ...]
    copies_before: Mapping[Node, tuple[Copy, ...]]
    copies_at_end: Mapping[Graph, tuple[Copy, ...]]
    use: MemoryUse


def plan_memory(graph: Graph, chip: Chip, donated: Sequence[bool] = ()) -> MemoryPlan:
    """Plan the HBM of a program. `donated` says of each input whether the program may overwrite it.

    Raises:
      OutOfMemoryError: the chip has too little HBM.
    """
    donated = tuple(donated) or (False,) * len(graph.inputs)
    planner = _Planner(graph, lifetimes(graph), donated)
    plan = planner.plan()
    if plan.use.peak_bytes > chip.hbm_bytes:
        raise OutOfMemoryError(
            f"{graph.name!r} needs {plan.use}: "
            f"{plan.use.peak_bytes - chip.hbm_bytes:,} more than the {chip.hbm_bytes:,} of chip {chip.name!r}. "
            f"Donate inputs that are replaced by outputs, use a smaller batch or a narrower dtype, or choose a chip with more memory."
        )
    return plan


@dataclass(slots=True, eq=False)
class _Place:
    """A buffer to be: the spans of all the values in it, its type, and what stands in it at the ends of the program."""

    type: TensorType
    spans: list[Span]
    name: str = ""
    kept: bool = False  # a constant, or an input that is not donated: never written
    input: int | None = None
    output: int | None = None
    data: bytes | None = None
    number: int = -1

    @property
    def ticks(self) -> Span:
        """First and last tick at which it is needed; whole ticks, so that what only just ends still has a place of its own."""
        return min(s for s, _ in self.spans) >> 1, max(e for _, e in self.spans) >> 1


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
    places: dict[Value, _Place] = field(default_factory=dict)
    members: dict[_Place, list[Value]] = field(default_factory=dict)
    temporaries: list[_Place] = field(default_factory=list)

    def plan(self) -> MemoryPlan:
        self._open_places()
        for a, b in self.lives.same:
            self._merge(a, b, same=True)
        for a, b in self.lives.wishes:
            self._merge(a, b)
        self._replace_donated()
        self._shape_as_read()
        outputs, final = self._outputs()
        before, at_end = self._control_copies()
        at_end[self.graph] = final
        return self._numbered(outputs, before, at_end)

    # --- sharing ----------------------------------------------------------------------------------------------------

    def _open_places(self) -> None:
        for value, spans in self.lives.spans.items():
            self._open(value, _Place(value.type, list(spans), value.name))
        for i, value in enumerate(self.graph.inputs):
            place = self.places[value]
            place.input, place.kept = i, not self.donated[i]
            if place.kept:
                place.spans = [(0, FOREVER)]
        pool: dict[tuple[DType, bytes], Value] = {}
        for node in self.graph.walk():
            for value in node.results:
                if value in self.places:
                    self.places[value].name = value.name or "/".join(filter(None, (node.scope, node.op)))
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
        if not same and (one.kept or two.kept or not _alike(one.type, two.type) or _meet(one.spans, two.spans)):
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
        maker = {value: node for node in self.graph.nodes for value in node.results}
        taken = {id(self.places[v]) for v in self.graph.outputs}
        free = {v: None for v, given in zip(self.graph.inputs, self.donated, strict=True) if given and id(self.places[v]) not in taken}
        for value in self.graph.outputs:
            if self.places[value].input is not None:
                continue
            node = maker.get(value)
            related = [v for i, v in enumerate(node.inputs) if may_update_in_place(node, i)] if node else []
            for candidate in [*(v for v in related if v in free), *free]:
                if candidate.type == value.type and self._merge(candidate, value):
                    del free[candidate]
                    break

    def _shape_as_read(self) -> None:
        """A buffer that a block reads whole has the shape it reads, not that of the value which was reshaped to it."""
        for node in self.graph.walk():
            if node.op not in ("outfeed", "loop", "switch", "while"):
                continue
            value = node.regions[0].outputs[0] if node.op == "while" else node.inputs[0]
            if self.places[value].input is None and self.places[value].data is None:
                self.places[value].type = value.type

    # --- copies -----------------------------------------------------------------------------------------------------

    def _outputs(self) -> tuple[list[_Place], list[tuple[_Place, _Place]]]:
        """The place of every output, one each; and the copies to those that need a place of their own."""
        end = self.lives.end[self.graph]
        found: list[_Place] = []
        copies: list[tuple[_Place, _Place]] = []
        for i, value in enumerate(self.graph.outputs):
            place = self.places[value]
            if place.kept or place.output is not None or (place.input is not None and place.type.shape != value.shape):
                target = _Place(value.type, [(2 * end + 1, FOREVER)], place.name)
                self.temporaries.append(target)
                copies.append((place, target))
                place = target
            place.output, place.type = i, value.type
            found.append(place)
        return found, self._in_sequence(copies, end)

    def _control_copies(self) -> tuple[dict[Node, list[tuple[_Place, _Place]]], dict[Graph, list[tuple[_Place, _Place]]]]:
        before: dict[Node, list[tuple[_Place, _Place]]] = {}
        at_end: dict[Graph, list[tuple[_Place, _Place]]] = {}
        for node in self.graph.walk():
            if node.op in ("loop", "while"):
                body = node.regions[-1]
                carries = node.inputs[len(node.inputs) - len(body.inputs) :]
                before[node] = self._moves(carries, body.inputs, self.lives.begin[node])
                at_end[body] = self._moves(body.outputs, body.inputs, self.lives.end[body])
            elif node.op == "switch":
                for branch in node.regions:
                    at_end[branch] = self._moves(branch.outputs, node.results, self.lives.end[branch])
        return before, at_end

    def _moves(self, sources: Iterable[Value], targets: Iterable[Value], tick: int) -> list[tuple[_Place, _Place]]:
        pairs = [(self.places[s], self.places[t]) for s, t in zip(sources, targets, strict=True)]
        return self._in_sequence([(s, t) for s, t in pairs if s is not t], tick)

    def _in_sequence(self, copies: list[tuple[_Place, _Place]], tick: int) -> list[tuple[_Place, _Place]]:
        """Copies meant to happen at once, in an order that gives the same: no source is overwritten early, cycles go over a spare."""
        pending, ordered = list(copies), []
        while pending:
            ready = next((c for c in pending if all(c[1] is not other[0] for other in pending if other is not c)), None)
            if ready is not None:
                pending.remove(ready)
                ordered.append(ready)
                continue
            saved = pending[0][1]
            spare = _Place(saved.type, [(2 * tick, 2 * tick + 1)], "spare")
            self.temporaries.append(spare)
            ordered.append((saved, spare))
            pending = [(spare if s is saved else s, t) for s, t in pending]
        return ordered

    # --- numbers ----------------------------------------------------------------------------------------------------

    def _numbered(
        self,
        outputs: list[_Place],
        before: Mapping[Node, list[tuple[_Place, _Place]]],
        at_end: Mapping[Graph, list[tuple[_Place, _Place]]],
    ) -> MemoryPlan:
        places = [*dict.fromkeys(self.places.values()), *self.temporaries]
        addresses, peak_bytes = assign([Request(p.type.elems * p.type.dtype.bytes, *p.ticks) for p in places])
        for number, place in enumerate(places):
            place.number = number

        def numbers(copies: list[tuple[_Place, _Place]]) -> tuple[Copy, ...]:
            return tuple(Copy(source.number, target.number) for source, target in copies)

        return MemoryPlan(
            tuple(Buffer(p.type.dtype, p.type.shape, a) for p, a in zip(places, addresses, strict=True)),
            tuple(self._name(p) for p in places),
            {value: place.number for value, place in self.places.items()},
            tuple(p.number for p in outputs),
            tuple(Constant(p.number, p.data) for p in places if p.data is not None),
            {node: numbers(copies) for node, copies in before.items() if copies},
            {region: numbers(copies) for region, copies in at_end.items() if copies},
            self._use(places, peak_bytes),
        )

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


def _purpose(place: _Place) -> str:
    if place.input is not None:
        return "input" if place.kept else "donated"
    return "constant" if place.data is not None else "output" if place.output is not None else ""


def _alike(a: TensorType, b: TensorType) -> bool:
    return (a.dtype, a.elems) == (b.dtype, b.elems)
