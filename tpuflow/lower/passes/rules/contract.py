"""Rules for products: transposes, reversals and converts around them become dimension numbers and labels."""

from __future__ import annotations

from dataclasses import replace

from tpuflow.isa.contraction import Contraction
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.graph.products import contraction_of
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites


def _ascending(axes: list[int]) -> bool:
    return axes == sorted(axes)


def _folded(rw: Rewriter, node: Node, side: str) -> tuple[Value, dict[str, tuple[int, ...]]] | None:
    """The operand before its transpose, and the dimension numbers that make up for it.

    Only where the free axes keep their order (else the result would be transposed) and the contracted axes theirs (else the sum
    would run in another order).
    """
    x = node.inputs[side == "rhs"]
    made = rw.maker(x, "transpose")
    if made is None:
        return None
    permutation, contract, batch = made.attrs["permutation"], node.attrs[f"{side}_contract"], node.attrs[f"{side}_batch"]
    free = [i for i in range(len(permutation)) if i not in (*contract, *batch)]
    if not _ascending([permutation[i] for i in free]) or not _ascending([permutation[i] for i in sorted(contract)]):
        return None
    moved = {f"{side}_{kind}": tuple(permutation[i] for i in node.attrs[f"{side}_{kind}"]) for kind in ("contract", "batch")}
    return made.inputs[0], moved


@rewrites("dot")
def _dot_of_transpose(rw: Rewriter, node: Node) -> Value | None:
    """dot(transpose(x), y): other dimension numbers on x. Windows read x in any order at no cost."""
    for at, side in enumerate(("lhs", "rhs")):
        if folded := _folded(rw, node, side):
            operand, moved = folded
            operands = (operand, node.inputs[1]) if at == 0 else (node.inputs[0], operand)
            return rw.emit("dot", operands, node.result.type, **{**node.attrs, **moved})
    return None


@rewrites("dot")
def _dot_of_converted_transpose(rw: Rewriter, node: Node) -> Value | None:
    """dot(convert(transpose(x)), y) = dot(transpose(convert(x)), y), and then the transpose folds."""
    for at in (0, 1):
        convert = rw.maker(node.inputs[at], "convert")
        made = rw.maker(convert.inputs[0], "transpose") if convert else None
        if convert is None or made is None:
            continue
        x = made.inputs[0]
        converted = rw.emit("convert", (x,), TensorType(convert.result.dtype, x.shape))
        operand = rw.emit("transpose", (converted,), convert.result.type, permutation=made.attrs["permutation"])
        operands = (operand, node.inputs[1]) if at == 0 else (node.inputs[0], operand)
        return rw.emit("dot", operands, node.result.type, **node.attrs)
    return None


@rewrites("transpose")
def _transpose_of_dot(rw: Rewriter, node: Node) -> Value | None:
    """A transpose that exchanges the free axes of the two sides: the product with its operands exchanged (products commute)."""
    dot = rw.maker(node.inputs[0], "dot")
    if dot is None:
        return None
    lhs, rhs = dot.inputs
    batch = len(dot.attrs["lhs_batch"])
    lhs_free = len(lhs.shape) - batch - len(dot.attrs["lhs_contract"])
    rank = len(dot.result.shape)
    exchanged = (*range(batch), *range(batch + lhs_free, rank), *range(batch, batch + lhs_free))
    in_order = [r for _, r in sorted(zip(dot.attrs["lhs_contract"], dot.attrs["rhs_contract"], strict=True))]
    if node.attrs["permutation"] != exchanged or not _ascending(in_order):
        return None
    attrs = {f"{new}_{kind}": dot.attrs[f"{old}_{kind}"] for new, old in (("lhs", "rhs"), ("rhs", "lhs")) for kind in ("contract", "batch")}
    return rw.emit("dot", (rhs, lhs), node.result.type, precision=dot.attrs["precision"], **attrs)


def _with_operand(rw: Rewriter, node: Node, at: int, operand: Value, contraction: Contraction) -> Value:
    """The convolution with one operand and its labels replaced."""
    operands = (operand, node.inputs[1]) if at == 0 else (node.inputs[0], operand)
    return rw.emit("conv", operands, node.result.type, **{**node.attrs, "contraction": contraction})


@rewrites("conv")
def _conv_of_transpose(rw: Rewriter, node: Node) -> Value | None:
    """conv(transpose(x), y) and conv(x, transpose(y)): other labels, if the sum keeps its order."""
    whole = contraction_of(node)
    for at, side in enumerate((whole.lhs, whole.rhs)):
        made = rw.maker(node.inputs[at], "transpose")
        if made is None:
            continue
        permutation = made.attrs["permutation"]
        turned = tuple(side[permutation.index(axis)] for axis in range(len(side)))
        sliding = tuple(replace(s, axis=permutation[s.axis]) for s in whole.sliding)
        moved = replace(whole, lhs=turned, sliding=sliding) if at == 0 else replace(whole, rhs=turned)
        if moved.contracted == whole.contracted:
            return _with_operand(rw, node, at, made.inputs[0], moved)
    return None


@rewrites("conv")
def _conv_of_reverse(rw: Rewriter, node: Node) -> Value | None:
    """conv(x, reverse(w)): the kernel's positions counted from its end, as the gradient of a convolution does."""
    whole, made = contraction_of(node), rw.maker(node.inputs[1], "reverse")
    if made is None:
        return None
    turned = {whole.rhs[axis]: node.inputs[1].shape[axis] for axis in made.attrs["axes"]}
    if not set(turned) <= {s.label for s in whole.sliding}:
        return None
    sliding = tuple(replace(s, dilation=-s.dilation) if s.label in turned else s for s in whole.sliding)
    bounds = tuple(b.from_the_end(turned) for b in whole.bounds)
    return _with_operand(rw, node, 1, made.inputs[0], replace(whole, sliding=sliding, bounds=bounds))


@rewrites("transpose")
def _transpose_of_conv(rw: Rewriter, node: Node) -> Value | None:
    """transpose(conv(x, y)): the result's labels in another order."""
    conv = rw.maker(node.inputs[0], "conv")
    if conv is None:
        return None
    whole = contraction_of(conv)
    turned = replace(whole, out=tuple(whole.out[p] for p in node.attrs["permutation"]))
    return rw.emit("conv", conv.inputs, node.result.type, **{**conv.attrs, "contraction": turned})


@rewrites("transpose")
def _transpose_of_convert(rw: Rewriter, node: Node) -> Value | None:
    """transpose(convert(x)) = convert(transpose(x)), however many converts, where the transpose can go into x: a product."""
    converts: list[Node] = []
    made = rw.maker(node.inputs[0])
    while made is not None and made.op == "convert":
        converts.append(made)
        made = rw.maker(made.inputs[0])
    if not converts or made is None or not (made.op in PRODUCTS or _repeats(rw, made)):
        return None
    shape = node.result.shape
    turned = rw.emit("transpose", (made.result,), TensorType(made.result.dtype, shape), permutation=node.attrs["permutation"])
    if rw.maker(turned, "transpose"):
        return None
    for convert in reversed(converts):
        turned = rw.emit("convert", (turned,), TensorType(convert.result.dtype, shape))
    return turned


@rewrites("transpose")
def _transpose_of_outer(rw: Rewriter, node: Node) -> Value | None:
    """transpose(x * y) = transpose(x) * transpose(y) where x and y are broadcasts, or converted ones: a product of elements without a sum,
    as `operations/products.py` makes of an outer product."""
    made = rw.maker(node.inputs[0], "mul")
    if made is None or not _repeats(rw, made):
        return None
    shape, permutation = node.result.shape, node.attrs["permutation"]
    turned = [rw.emit("transpose", (x,), TensorType(x.dtype, shape), permutation=permutation) for x in made.inputs]
    return rw.emit("mul", turned, node.result.type)


def _repeats(rw: Rewriter, node: Node | None) -> bool:
    """Whether a node's result is a broadcast, a converted one, or a product of such elements: one that a transpose goes through for
    nothing."""
    if node is None or node.op == "broadcast":
        return node is not None
    return node.op in ("convert", "mul") and all(_repeats(rw, rw.maker(x)) for x in node.inputs)
