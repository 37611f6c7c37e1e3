"""From a node's op, or a fused region's kind, to the template that emits its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.chips import Chip
from tpuflow.errors import CompileError
from tpuflow.isa.program import Buffer
from tpuflow.lower.emit.indexed import emit_scatter_rows, emit_take_rows
from tpuflow.lower.emit.map import emit_map, map_levels
from tpuflow.lower.emit.matmul import dot_levels, emit_matmul, product_of, product_seconds
from tpuflow.lower.emit.move import (
    emit_concatenate,
    emit_dynamic_slice,
    emit_dynamic_update_slice,
    emit_pad,
    emit_pad_with,
    emit_plain_copy,
    emit_reverse,
    emit_slice,
    emit_transpose,
)
from tpuflow.lower.emit.reduce import emit_reduce, live_reductions, reduce_levels
from tpuflow.lower.emit.region import ELEMENTWISE, Region, Roots
from tpuflow.lower.emit.repeated import Repeated
from tpuflow.lower.emit.rows import emit_rows, row_levels
from tpuflow.lower.emit.scan import emit_cumulative
from tpuflow.lower.emit.several import emit_several
from tpuflow.lower.emit.site import Emitted, Kernels, OperandNumbers, Plans, Site, build
from tpuflow.lower.emit.sort import emit_sort
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind, for_all
from tpuflow.lower.graph.ops import ENTRIES, PRODUCTS
from tpuflow.lower.graph.products import block_of, sizes_of
from tpuflow.lower.passes.kernel_cost import busy_seconds
from tpuflow.lower.passes.sum_in_product import split_sums
from tpuflow.lower.passes.unit_seconds import start_seconds
from tpuflow.lower.tiling import ALONE, Prices

Scalar = int | float | bool


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind of kernel is emitted: its template, and the levels of its region in the order in which they store results."""

    template: Callable[[Site], Plans]
    levels: Callable[[Region], list[Roots]]


def emit_product(site: Site) -> Plans:
    """A product with sums of its results: one kernel if that fits on the chip and saves time, else two; as many as tilings are given."""
    if not live_reductions(site.region):
        return emit_matmul(site)

    def two_kernels() -> Plans:
        return tuple(plan for part in _as_two(site) for plan in emit_site(part))

    apart = len(site.fixed_tilings) > 1 if site.fixed_tilings else _is_faster_apart(site)
    return two_kernels() if apart else emit_matmul(site, two_kernels)


def _is_faster_apart(site: Site) -> bool:
    """Whether a product and the sums of its results take less time as two kernels: as one, a step has to take in all of the contraction,
    which leaves room for few rows and columns if that is long. A contraction of one block is a single step in any case.
    """
    dot = product_of(site.region)
    sizes = sizes_of(dot)
    if all(n == sizes[x] for x, n in block_of(dot).items()):
        return False
    product, sums = _as_two(site)
    apart = product_seconds(product) + busy_seconds(sums.node, site.chip) + start_seconds(site.chip)
    return apart < product_seconds(site)


def _as_two(site: Site) -> Iterator[Site]:
    """The product and the sums of its results, as two kernels."""
    buffer_of = dict(zip(site.node.inputs, site.region.inputs.values(), strict=True))
    buffer_of |= {v: buffer for v, (_, buffer) in zip(site.node.results, site.region.outputs, strict=True)}
    for node in split_sums(site.node):
        yield replace(site, node=node, region=Region.of(node, [buffer_of[v] for v in (*node.inputs, *node.results)]))


def emit_site(site: Site) -> Plans:
    """The plans of a site's node, by the template for its op or kind."""
    template = FORMS[site.node.attrs["kind"]].template if site.node.op == "fused" else TEMPLATES[site.node.op]
    return template(site)


def _levels_of_members(region: Region) -> list[Roots]:
    """None: the members of a horizontally fused kernel have levels of their own."""
    return []


FORMS: Mapping[Kind, Form] = for_all(
    {
        Kind.MAP: Form(emit_map, map_levels),
        Kind.REDUCE: Form(emit_reduce, reduce_levels),
        Kind.DOT: Form(emit_product, dot_levels),
        Kind.ROWS: Form(emit_rows, row_levels),
        Kind.SEVERAL: Form(lambda site: emit_several(site, emit_site), _levels_of_members),
    },
    __name__,
)
TEMPLATES: Mapping[str, Callable[[Site], Plans]] = {
    **dict.fromkeys((*ELEMENTWISE, "full", "iota", *ENTRIES, "join"), emit_map),
    "constant": lambda site: (),  # its bytes are in the Program's constant section
    "copy": emit_plain_copy,
    "reshape": emit_plain_copy,
    "transpose": emit_transpose,
    "slice": emit_slice,
    "pad": emit_pad,
    "concatenate": emit_concatenate,
    "reverse": emit_reverse,
    "dynamic_slice": emit_dynamic_slice,
    "dynamic_update_slice": emit_dynamic_update_slice,
    "take_rows": emit_take_rows,
    "scatter_rows": emit_scatter_rows,
    "reduce": emit_reduce,
    **dict.fromkeys(PRODUCTS, emit_matmul),
    "cumulative": emit_cumulative,
    "sort": emit_sort,
}


def _unknown(value: Value) -> Scalar | None:
    return None


def emit_node(
    node: Node,
    buffer_of: Callable[[Value], int],
    buffers: Sequence[Buffer],
    chip: Chip,
    splat_of: Callable[[Value], Scalar | None] = _unknown,
    repeated: Repeated | None = None,
    prices: Prices = ALONE,
) -> Emitted:
    """The kernels that compute a node's results, in order; none if there is nothing to compute.

    `buffer_of` gives the HBM buffer of every operand and result. A result may share its buffer with an operand only where
    `overwritable` says so. `splat_of` gives the number that a value is known to hold everywhere, if it is: padding with a
    known number takes one kernel instead of two. `repeated` holds what was emitted before: nodes of the same form are emitted once. Where
    the node has tilings, its kernels are cut so, and not otherwise. `prices` are those of the program it is in, for all nodes the same.

    Raises:
      CompileError: the node has no template, needs tiles of too many axes, or a buffer does not fit its value.
      OutOfMemoryError: its smallest possible tiles do not fit on the chip.
    """
    where = node.source or node.op
    if node.op != "fused" and node.op not in TEMPLATES:
        raise CompileError(f"{where}: {node.op!r} is not emitted as kernels; nodes that are: fused, {', '.join(TEMPLATES)}")

    def checked(value: Value) -> int:
        buffer = buffers[buffer_of(value)]
        if (buffer.dtype, buffer.elems) != (value.dtype, value.type.elems):
            raise CompileError(f"{where}: {value.type} was given a buffer of {buffer.dtype}{list(buffer.shape)}")
        return buffer_of(value)

    inputs = len(node.inputs)
    fill = splat_of(node.inputs[1]) if node.op == "pad" else None
    if fill is not None:
        node = replace(node, inputs=node.inputs[:1])  # the number needs no buffer
    used = tuple([checked(value) for value in (*node.inputs, *node.results)])

    shared = _shared(used[: len(node.inputs)], used[len(node.inputs) :], buffers)

    def emit() -> Emitted:
        site = Site(node, Region.of(node, used), chip, node.scope, fixed_tilings=node.tilings, prices=prices, shared=shared)
        plans = emit_site(site) if fill is None else emit_pad_with(site, fill)
        return build(plans, node.tilings, OperandNumbers.of(used[: len(node.inputs)], used[len(node.inputs) :], inputs))

    return emit() if repeated is None else repeated.emitted(node, used, shared, fill, emit)


def _shared(operands: Sequence[int], results: Sequence[int], buffers: Sequence[Buffer]) -> dict[int, int]:
    """The buffers of results that may become one with those of operands (`MemoryPlan.replaced`): they have their addresses."""
    places = {(buffers[b].space, buffers[b].address): b for b in operands if buffers[b].bytes}
    found = {b: places.get((buffers[b].space, buffers[b].address), b) for b in results}
    return {result: operand for result, operand in found.items() if result != operand}


def emit_copy(source: int, target: int, buffers: Sequence[Buffer], chip: Chip, where: str = "") -> Kernels:
    """The kernel that copies one buffer to another of the same type and number of elements."""
    src, dst = (Value(TensorType(buffers[b].dtype, (buffers[b].elems,))) for b in (source, target))
    node = Node("copy", (src,), (dst,), source=where)
    return emit_node(node, {src: source, dst: target}.__getitem__, buffers, chip).kernels
