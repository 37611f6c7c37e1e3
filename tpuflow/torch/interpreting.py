"""`Interpreter`: evaluates an ATen graph on JAX arrays, node by node, with the functions of the table."""

from __future__ import annotations

import contextlib
import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpuflow.errors import GraphError, TpuflowError, UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.torch import rows
from tpuflow.torch.arrays import INT32_MAX, INT32_MIN, NARROW, constant
from tpuflow.torch.table import RANDOM, ROWS

assert rows  # importing them fills the table

_IGNORED = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "physical_layout"}
"""Arguments that say where and how a tensor lies."""
_INT64 = torch.iinfo(torch.int64)
_ENDS = {_INT64.min: INT32_MIN, _INT64.max: INT32_MAX}
"""The limits of int64, which graphs use for "unbounded", and the limits of int32 in their place."""
_STRIDED = ("aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default")
_PLAIN = {"operator", "_operator", "math", "builtins", "torch", "tpuflow"}
"""Packages of functions that are called unchanged: arithmetic of sizes, getitem, and functions that `graphs` has put into a graph."""


class Interpreter:
    """A graph whose call is traced by JAX: `interpreter(inputs, key)` gives its flat outputs.

    Inputs and outputs are arrays, and Python numbers where the graph has symbolic sizes. `draws`: whether a key is needed.
    """

    def __init__(self, graph_module: torch.fx.GraphModule):
        self._module, self._nodes = graph_module, _needed(graph_module.graph)
        self.draws = any(str(node.target) in RANDOM for node in self._nodes if node.op == "call_function")
        for node in self._nodes:
            if node.op == "call_function":
                _check_known(node)
            elif node.op not in ("placeholder", "get_attr", "output"):
                raise GraphError(f"{where(node)}: an ATen graph has no {node.op} nodes.")

    def __call__(self, inputs: Sequence[Any], key: Any = None) -> list[Any]:
        """Outputs as the graph returns them; None where it returns none."""
        values: dict[torch.fx.Node, Any] = {}
        remaining = iter(inputs)
        for count, node in enumerate(self._nodes):
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = self._attribute(node)
            elif node.op == "output":
                return list(torch.fx.map_arg(node.args[0], lambda one: _value(one, values)))  # type: ignore[arg-type]
            else:
                values[node] = _on_host(node, values) if _is_of_sizes(node, values) else _evaluate(node, values, key, count)
        raise GraphError("the graph has no output node.")

    def _attribute(self, node: torch.fx.Node) -> Any:
        value: Any = operator.attrgetter(str(node.target))(self._module)
        if not isinstance(value, torch.Tensor):
            raise UnsupportedPrimitiveError(
                f"{where(node)}: {node.target} is a graph inside the graph (control flow); only straight code has a meaning here. Use "
                "torch.where between values, or leave the condition to Python."
            )
        return constant(value, where(node))


def _needed(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that results depend on, and all inputs; nodes that only assert something are left out."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes, [node])
    return [node for node in graph.nodes if node in needed or node.op == "placeholder"]


def _is_of_sizes(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> bool:
    """Whether a node is a floating-point scalar that depends on sizes alone, which PyTorch computes in float64."""
    expected = node.meta.get("val")
    return (
        isinstance(expected, torch.Tensor)
        and expected.ndim == 0
        and expected.is_floating_point()
        and str(node.target) not in RANDOM
        and all(isinstance(values[one], (int, float, torch.Tensor)) for one in node.all_input_nodes)
    )


def _on_host(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> torch.Tensor:
    """Evaluate a node of sizes by PyTorch itself, while the Program is traced; the sizes are known then."""
    assert callable(node.target)
    with _disable_current_modes():
        return node.target(*torch.fx.map_arg(node.args, values.__getitem__), **torch.fx.map_arg(node.kwargs, values.__getitem__))  # type: ignore[misc]


def _value(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """A node's value for the device: numbers that PyTorch has in float64 are in fp32 there."""
    value = values[node]
    if not isinstance(value, torch.Tensor):
        return value
    return constant(value.float() if value.dtype == torch.float64 else value, where(node))


def _evaluate(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], key: Any, count: int) -> Any:
    row, name = _row(node), str(node.target)
    args = _mapped(node.args, values)
    kwargs = {k: _mapped(v, values) for k, v in node.kwargs.items() if k not in _IGNORED}
    if name in _STRIDED:
        _check_in_order(node)
    if name in RANDOM:
        args = (jax.random.fold_in(key, count), *args)
    try:
        with _scope(node):
            result = row(*args, **kwargs)
    except TpuflowError as error:
        raise type(error)(f"{where(node)}: {error}") from error
    except Exception as error:
        error.add_note(f"in {where(node)}")
        raise
    return result if row is operator.getitem else _typed(node, result)


def _mapped(argument: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
    """An argument with nodes as their values, element types as NumPy's, and whole numbers in 32 bits; lists stay lists."""
    if isinstance(argument, torch.fx.Node):
        return _value(argument, values)
    if isinstance(argument, (list, tuple)):
        return (
            type(argument)(_mapped(a, values) for a in argument)
            if type(argument) in (list, tuple)
            else [_mapped(a, values) for a in argument]
        )
    if isinstance(argument, torch.dtype):
        return NARROW.get(argument)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return _narrowed(argument)
    return argument


def _narrowed(number: int) -> int:
    if INT32_MIN <= number <= INT32_MAX:
        return number
    if number in _ENDS:
        return _ENDS[number]
    raise UnsupportedDtypeError(f"the whole number {number} does not fit in 32 bits, which the device's integers have.")


def _row(node: torch.fx.Node) -> Callable[..., Any]:
    target = node.target
    assert callable(target)
    return ROWS.get(str(target), target)


def _check_known(node: torch.fx.Node) -> None:
    """Raises UnsupportedPrimitiveError for an operation without a row."""
    target, name = node.target, str(node.target)
    if name in ROWS or (not _is_operator(target) and getattr(target, "__module__", "").partition(".")[0] in _PLAIN):
        return
    near = difflib.get_close_matches(name, ROWS, 3)
    raise UnsupportedPrimitiveError(
        f"{where(node)}: no row for {name}{_types(node)} in the table of ATen operations; nearest with one: {', '.join(near) or 'none'}. "
        f"Write it with other operations, or enter a row: @tpuflow.torch.lowers({name!r}) above a function of JAX arrays."
    )


def _is_operator(target: Any) -> bool:
    return isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def _check_in_order(node: torch.fx.Node) -> None:
    (source,) = node.args[:1]
    assert isinstance(source, torch.fx.Node)
    value = source.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_contiguous():
        raise UnsupportedPrimitiveError(
            f"{where(node)}: as_strided of a tensor that lies in memory in another order; use .contiguous() before."
        )


def _typed(node: torch.fx.Node, result: Any) -> Any:
    """The result with the element types that PyTorch says it has.

    Raises:
      GraphError: the shapes are not those that PyTorch says (a defect of the row).
    """
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        return _one_typed(node, expected, jnp.asarray(result))
    if isinstance(expected, (list, tuple)):
        return [
            _one_typed(node, e, jnp.asarray(r)) if isinstance(e, torch.Tensor) and r is not None else r
            for e, r in zip(expected, result, strict=False)
        ]
    return result


def _one_typed(node: torch.fx.Node, expected: torch.Tensor, result: Any) -> Any:
    dtype = NARROW.get(expected.dtype)
    if dtype is None:
        raise UnsupportedDtypeError(
            f"{where(node)}: {node.target} gives {expected.dtype}, which the device does not have; compute in torch.float32 (x.float())."
        )
    shape = tuple(expected.shape)
    if all(isinstance(n, int) for n in shape) and shape != result.shape:
        raise GraphError(
            f"{where(node)}: the row of {node.target} gives shape {result.shape}, PyTorch {shape}: a defect of tpuflow; report it."
        )
    return result if result.dtype == dtype else result.astype(dtype)


# --- where a node is from ---------------------------------------------------------------------------------------------


def where(node: torch.fx.Node) -> str:
    """The user's line and the module that a node is from."""
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ") and "<eval_with_key>" not in line]
    file = lines[-1].removeprefix("File ").replace('"', "").replace(", line ", ":").replace(", in ", " in ") if lines else "the graph"
    module = module_path(node)
    return f"{file} ({module})" if module else file


def module_path(node: torch.fx.Node) -> str:
    """The name of the module that a node is from, as in state dicts; nothing at the top."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return _plain(paths[-1]) if paths else ""


def _plain(path: str) -> str:
    """What dynamo writes of a module, L['self']._modules['h']._modules['0'] or L['self'].h[0], as h.0."""
    parts = re.findall(r"\w+", re.sub(r"^L\['\w+'\]", "", path))
    return ".".join(part for part in parts if part != "_modules")


def _scope(node: torch.fx.Node) -> contextlib.AbstractContextManager[Any]:
    """The name scope of a node's module, from which reports have the layer."""
    path = module_path(node)
    return jax.named_scope(path.replace(".", "/")) if path else contextlib.nullcontext()


def _types(node: torch.fx.Node) -> str:
    found = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    texts = [str(t.dtype).removeprefix("torch.") + str(list(t.shape)) for t in found]
    return f"({', '.join(texts)})"
