"""Decodes MLIR modules to plain data. With `parsing`, the only file that uses jaxlib's MLIR bindings (jaxlib 0.8 to 0.10)."""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo

from tpuflow.dtypes import BF16, BY_NAME, F16, F32, PRED, STORAGE, U32, DType
from tpuflow.errors import ModuleError, UnsupportedPrimitiveError
from tpuflow.jaxprs.compat import is_library
from tpuflow.jaxprs.versions import location_kind
from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.importers.stablehlo.module import (
    Block,
    DeclaredType,
    ForeignType,
    Function,
    Module,
    Operation,
    Place,
    Symbol,
    TokenType,
    Unreadable,
    captured_by,
)
from tpuflow.lower.importers.stablehlo.parsing import BYTECODE, parse, try_elsewhere
from tpuflow.lower.operations.complex import ComplexType


def read_module(data: bytes | str, *, trusted: bool = False) -> Module:
    """A module out of a portable artifact, MLIR bytecode, or text.

    Bytecode that is not trusted is read by another process first, which may crash on it.

    Raises:
      ModuleError: it is none, or damaged.
    """
    if isinstance(data, bytes) and data.startswith(BYTECODE) and not trusted and (problem := try_elsewhere(data)):
        raise _not_a_module(problem)
    try:
        module = parse(data)
    except ValueError as error:
        raise _not_a_module(str(error)) from error
    return _Reader().module(module)


def _not_a_module(problem: str) -> ModuleError:
    return ModuleError(
        f"not a StableHLO module, or a damaged one: {' '.join(problem.split())[:400]}. Expected what jax.jit(f).lower(...).as_text() "
        "gives, MLIR bytecode, or a portable artifact such as jax.export.export(jax.jit(f))(...).mlir_module_serialized."
    )


class _Reader:
    """Decodes one module; types, attributes and locations are cached."""

    def __init__(self) -> None:
        self._types: dict[Any, DeclaredType] = {}
        self._attributes: dict[Any, Any] = {}
        self._places: dict[Any, Place] = {}
        self._numbers: dict[Any, int] = {}
        self._tuples: dict[Any, tuple[Any, ...]] = {}  # packed tuple -> the numbers of its elements, nested ones as tuples

    def module(self, module: ir.Module) -> Module:
        operations = [view.operation for view in module.body.operations]
        functions = [self._function(op) for op in operations if op.name == "func.func" and op.regions[0].blocks]
        attributes: Any = module.operation.attributes
        name = attributes["sym_name"].value if "sym_name" in attributes else ""
        counts = [attributes[count].value for count in ("mhlo.num_partitions", "mhlo.num_replicas") if count in attributes]
        return Module(name.removeprefix("jit_"), {f.name: f for f in functions}, math.prod(counts) if counts else 0)

    def _function(self, op: Any) -> Function:
        attributes = op.attributes
        block = _only_block(op.regions[0], op)
        kind = ir.FunctionType(attributes["function_type"].value)
        return Function(
            attributes["sym_name"].value,
            self._block(block),
            tuple(map(self._type, kind.results)),
            self._dictionaries(attributes, "arg_attrs", len(kind.inputs)),
            self._dictionaries(attributes, "res_attrs", len(kind.results)),
            tuple(_name_of(a.location) for a in block.arguments),
        )

    def _dictionaries(self, attributes: Any, name: str, count: int) -> tuple[Mapping[str, Any], ...]:
        return self._attribute(attributes[name]) if name in attributes else ({},) * count

    def _block(self, block: Any) -> Block:
        arguments = tuple(self._number(a) for a in block.arguments)
        *inner, last = (view.operation for view in block.operations)
        if not last.name.endswith(".return"):
            raise _branching(last)
        operations = tuple(self._operation(op) for op in inner if not self._is_taken_apart(op))
        outputs = self._operands(last)
        types = tuple(self._type(a.type) for a in block.arguments)
        return Block(arguments, types, operations, outputs, captured_by(arguments, operations, outputs))

    def _operation(self, op: Any) -> Operation:
        operands = self._operands(op)
        blocks = tuple(self._block(_only_block(region, op)) for region in op.regions)
        results, types = self._results(op)
        attributes = op.attributes
        return Operation(
            op.name, operands, results, types,
            {name: self._named(attributes, name) for name in attributes}, blocks, self._place(op.location),
        )  # fmt: skip

    def _results(self, op: Any) -> tuple[tuple[int, ...], tuple[DeclaredType, ...]]:
        """Numbers and types of an operation's results: the elements, if it makes a tuple (which custom calls do after XLA's passes)."""
        values = tuple(op.results)
        if len(values) != 1 or not isinstance(values[0].type, ir.TupleType):
            return tuple(map(self._number, values)), tuple(self._type(v.type) for v in values)
        kind: Any = values[0].type
        elements = self._tuples[values[0]] = tuple(self._number((values[0], i)) for i in range(kind.num_types))
        return elements, tuple(self._type(kind.get_type(i)) for i in range(kind.num_types))

    def _operands(self, op: Any) -> tuple[int, ...]:
        """The value numbers of an operation's operands (of a terminator: of the block's results)."""
        if any(v in self._tuples for v in op.operands):
            raise UnsupportedPrimitiveError(
                f"{_where(op)}: {op.name!r} on a tuple, of which the device has none; only stablehlo.get_tuple_element takes one. Give it "
                "the elements one by one."
            )
        return tuple(self._numbers[v] for v in op.operands)

    def _is_taken_apart(self, op: Any) -> bool:
        """Whether an operation only packs a tuple, or unpacks one that was packed here: users then read the elements directly."""
        if op.name == "stablehlo.tuple":
            self._tuples[op.results[0]] = tuple(self._tuples.get(v, self._numbers.get(v)) for v in op.operands)
            return True
        if op.name != "stablehlo.get_tuple_element" or op.operands[0] not in self._tuples:
            return False
        element = self._tuples[op.operands[0]][op.attributes["index"].value]
        known: dict[Any, Any] = self._tuples if isinstance(element, tuple) else self._numbers
        known[op.results[0]] = element
        return True

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _type(self, kind: Any) -> DeclaredType:
        found = self._types.get(kind)
        if found is None:
            found = self._types[kind] = _declared(kind)
        return found

    def _named(self, attributes: Any, name: str) -> Any:
        try:
            return self._attribute(attributes[name])
        except TypeError as error:  # of a kind that the bindings do not know
            return _complex_elements(str(error))

    def _attribute(self, attribute: Any) -> Any:
        if attribute not in self._attributes:
            self._attributes[attribute] = _decoded(attribute)
        return self._attributes[attribute]

    def _place(self, location: Any) -> Place:
        key = location.attr
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = _place_of(location)
        return found


def _only_block(region: Any, op: Any) -> Any:
    """The block of a region; StableHLO has one in each."""
    if len(region.blocks) != 1:
        raise _branching(op)
    return region.blocks[0]


def _where(op: Any) -> str:
    return _place_of(op.location).location or "unknown source line"


def _branching(op: Any) -> UnsupportedPrimitiveError:
    return UnsupportedPrimitiveError(
        f"{_where(op)}: {op.name!r} with blocks that branch to others, which StableHLO has not. Use stablehlo.if, case and while."
    )


# --- types ------------------------------------------------------------------------------------------------------------

_WORDS = (
    {"f32": F32, "f16": F16, "bf16": BF16, "i1": PRED}
    | {f"{mlir}{bits}": BY_NAME[f"{ours}{bits}"] for mlir, ours in (("i", "s"), ("ui", "u")) for bits in (2, 4, 8, 16, 32)}
    | {dtype.name[:2] + dtype.name[2:].upper(): dtype for dtype in STORAGE if dtype.computed.is_float}
)


def _declared(kind: Any) -> DeclaredType:
    if str(kind) == "!stablehlo.token":
        return TokenType()
    if not isinstance(kind, ir.RankedTensorType):
        return ForeignType(str(kind), "the device has arrays of numbers only. Leave what has this type out of what is compiled.")
    if not kind.has_static_shape:
        return ForeignType(str(kind), "its shape is not known when it is compiled. Export, or compile, for one shape: every axis a number.")
    element = str(kind.element_type)
    if element == "complex<f32>":
        return ComplexType(tuple(kind.shape))
    dtype = _WORDS.get(element)
    if dtype is None:
        counter = TensorType(U32, tuple(kind.shape)) if element == "ui64" else None
        return ForeignType(str(kind), _lacking(element), counter)
    return TensorType(dtype, tuple(kind.shape))


def _lacking(element: str) -> str:
    """Why there is no such element type, and what to do."""
    known = ", ".join(_WORDS)
    if element.startswith("complex"):
        return f"the device has no complex numbers of two {element[8:-1]}, only of two f32. Cast the array to complex64."
    if element in ("f64", "i64", "ui64"):
        return f"the device has no 64-bit elements, only {known}. Cast the array to 32 bits, or leave jax_enable_x64 off."
    return f"the device has no such elements, only {known}. Cast the array with x.astype(...)."


# --- attributes -------------------------------------------------------------------------------------------------------


def _elements(attribute: Any) -> Any:
    """The array of a dense constant."""
    kind = ir.RankedTensorType(attribute.type)
    declared = _declared(kind)
    if not isinstance(declared, TensorType):
        return np.array(attribute) if str(kind.element_type) in ("i64", "ui64") else Unreadable(str(kind))
    if not declared.elems:
        return np.zeros(declared.shape, declared.dtype.numpy)
    if declared.dtype == BF16 or declared.dtype.wide is not None:
        return _written_elements(attribute, declared)
    return np.array(attribute).reshape(declared.shape)


_COMPLEX = re.compile(r"dense<(?P<data>.*)> : tensor<(?P<shape>(?:\d+x)*)complex<f32>>", re.DOTALL)
_NUMBER = re.compile(r"0x[0-9A-Fa-f]+|[-+.\deE]+")


def _complex_elements(text: str) -> np.ndarray | Unreadable:
    """The array of a dense constant of complex numbers, which the bindings give as text only: pairs, one pair for all, or bytes."""
    found = _COMPLEX.search(text)
    if found is None:
        return Unreadable(text)
    data, shape = found["data"], tuple(int(n) for n in found["shape"].split("x") if n)
    if data.startswith('"0x'):
        flat = np.frombuffer(bytes.fromhex(data[3:-1]), np.complex64)
    else:
        parts = [_float(word) for word in _NUMBER.findall(data)]
        flat = np.array(parts, np.float32).view(np.complex64)
    return np.full(shape, flat[0]) if flat.size == 1 else flat.reshape(shape)


def _float(word: str) -> float:
    """A number, or the bits of one."""
    return float(np.uint32(int(word, 16)).view(np.float32)) if word.startswith("0x") else float(word)


def _written_elements(attribute: Any, declared: TensorType) -> np.ndarray:
    """Numbers of bf16 and of types that are only stored, which the bindings give as text only: one for each, one for all, or bytes."""
    dtype, data = declared.dtype, str(attribute).removeprefix("dense<").rsplit("> : ", 1)[0]
    if data.startswith('"0x'):
        flat = _of_bytes(bytes.fromhex(data[3:-1]), dtype)
    else:
        flat = np.concatenate([_of_word(word, dtype) for word in _NUMBER.findall(data)])
    return np.full(declared.shape, flat[0]) if flat.size == 1 else flat.reshape(declared.shape)


def _of_bytes(data: bytes, dtype: DType) -> np.ndarray:
    return np.frombuffer(data, dtype.numpy) if dtype.computed.is_float else np.frombuffer(data, np.uint8).astype(dtype.numpy)


def _of_word(word: str, dtype: DType) -> np.ndarray:
    """A number, or the bits of a float."""
    if word.startswith("0x"):
        return _of_bytes(int(word, 16).to_bytes(dtype.numpy.itemsize, "little"), dtype)
    return np.array([float(word)], dtype.computed.numpy).astype(dtype.numpy)


_DECODERS: dict[type, Callable[[Any], Any]] = {
    ir.IntegerAttr: lambda a: a.value,
    ir.BoolAttr: lambda a: a.value,
    ir.FloatAttr: lambda a: a.value,
    ir.StringAttr: lambda a: a.value,
    ir.FlatSymbolRefAttr: lambda a: Symbol(a.value),
    ir.DenseI64ArrayAttr: tuple,
    ir.DenseBoolArrayAttr: tuple,
    ir.ArrayAttr: lambda a: tuple(_decoded(one) for one in a),
    ir.DictAttr: lambda a: {one.name: _decoded(one.attr) for one in a},
    ir.UnitAttr: lambda a: True,
    ir.DenseFPElementsAttr: _elements,
    ir.DenseIntElementsAttr: _elements,
    ir.DenseResourceElementsAttr: _elements,
}
_ENUMERATIONS = (
    stablehlo.ComparisonDirectionAttr, stablehlo.ComparisonTypeAttr, stablehlo.PrecisionAttr, stablehlo.RngAlgorithmAttr,
    stablehlo.TransposeAttr, stablehlo.FftTypeAttr, chlo.ComparisonDirectionAttr, chlo.ComparisonTypeAttr, chlo.PrecisionAttr,
)  # fmt: skip
_RECORDS = (
    stablehlo.DotDimensionNumbers, stablehlo.ConvDimensionNumbers, stablehlo.GatherDimensionNumbers, stablehlo.ScatterDimensionNumbers,
    stablehlo.DotAlgorithm,
)  # fmt: skip


def _decoded(attribute: Any) -> Any:
    """Numbers, strings, tuples and arrays; enumerations as the name of their value, records as the bindings have them."""
    decoder = _DECODERS.get(type(attribute))
    if decoder is not None:
        return decoder(attribute)
    for kind in _ENUMERATIONS:
        if kind.isinstance(attribute):
            return kind(attribute).value
    for kind in _RECORDS:
        if kind.isinstance(attribute):
            return kind(attribute)
    return Unreadable(str(attribute))


# --- places -----------------------------------------------------------------------------------------------------------


def _name_of(location: Any) -> str:
    """The name of an argument."""
    return location.name_str if location_kind(location) == "name" else ""


def _place_of(location: Any) -> Place:
    names: list[str] = []
    frames: list[tuple[str, int, str]] = []
    _collect(location, names, frames)
    scope, primitive = _scope_of(names[0]) if names else ("", "")
    if not frames:
        return Place(scope=scope, primitive=primitive)
    users = next((f for f in frames if not is_library(f[0])), None)
    file, line, function = users or frames[0]
    if file == _NO_FILE:
        return Place(f"line {line}", f"line {line} of the module", scope, primitive, users=True)
    where = f":{line} ({function})" if function else f":{line}"
    return Place(f"{os.path.basename(file)}{where}", f"{file}{where}", scope, primitive, users=users is not None)


_NO_FILE = "-"
"""The file name in locations of MLIR text that has no locations of its own."""


def _collect(location: Any, names: list[str], frames: list[tuple[str, int, str]], function: str | None = None) -> None:
    """Names (the outermost first) and frames (the innermost call first) of a location, as JAX nests them.

    The first name outside of call sites (function: None) is the operation's; others are of the functions that lines are in.
    """
    kind = location_kind(location)
    if kind == "name":
        first = function is None and not names
        names.append(location.name_str)
        _collect(location.child_loc, names, frames, None if first else location.name_str)
    elif kind == "file":
        frames.append((location.filename, location.start_line, function or ""))
    elif kind == "callsite":
        _collect(location.callee, names, frames, "")
        _collect(location.caller, names, frames, "")
    elif kind == "fused":
        for part in location.locations:
            _collect(part, names, frames, function)


_STRUCTURE = re.compile(r"(?<![^/])(while/(body|cond)|cond/branch_\d+_fun|closed_call|checkpoint|rematted_computation)(?=/)")
"""The components that JAX adds to operations' names for loops, branches and calls."""
_CALL = re.compile(r"jit\([^()/]*\)")


def _scope_of(name: str) -> tuple[str, str]:
    """Scope and primitive of the name of an operation: "jvp(Model)/Dense_0", "dot_general" of
    "jit(step)/jvp(Model)/Dense_0/dot_general"."""
    *scopes, last = _STRUCTURE.sub("", name).split("/")
    primitive = "jit" if _CALL.search(last) else last
    parts = [_CALL.sub("", part) for part in (*scopes, *([last] if primitive == "jit" else []))]
    return "/".join(filter(None, parts)), primitive
