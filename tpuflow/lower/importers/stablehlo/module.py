"""A StableHLO module as plain data: functions, blocks, operations, with decoded types, attributes and source locations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuflow.errors import UnsupportedDtypeError
from tpuflow.isa.calls import HOST_CALLS
from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.operations.complex import ComplexType, Type
from tpuflow.lower.operations.movement import TOKEN


@dataclass(frozen=True, slots=True)
class ForeignType:
    """A type that the device lacks: its text, and why and what to do instead (`problem`); `counter`: for arrays of ui64, the u32 type of
    the same shape (see `wide.py`).
    """

    text: str
    problem: str
    counter: TensorType | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TokenType:
    """The type of a token, which orders effects: a Program's are in its order anyway, so on the device it is an array of nothing."""

    def __str__(self) -> str:
        return "token"


DeclaredType = TensorType | ComplexType | TokenType | ForeignType


def device_type(declared: DeclaredType, where: str) -> Type:
    """The device's type for a declared one; a token is an empty array.

    Raises:
      UnsupportedDtypeError: the device has no such type.
    """
    if isinstance(declared, ForeignType):
        raise UnsupportedDtypeError(f"{where}: {declared.text}: {declared.problem}")
    return TOKEN if isinstance(declared, TokenType) else declared


def port_type(declared: DeclaredType, where: str, *, complex_ports: bool = False) -> TensorType:
    """The type of an argument or result of the program; complex ones, if `complex_ports` allows them, are f32[2, ...].

    Raises:
      UnsupportedDtypeError: the device has no such type, or it is complex and not allowed.
    """
    found = device_type(declared, where)
    if isinstance(found, ComplexType) and complex_ports:
        return found.port
    if isinstance(found, ComplexType):
        raise UnsupportedDtypeError(
            f"{where}: {found}: programs take and give no complex numbers, which are there within them only. Pass the real and the "
            "imaginary part as two float32 arrays."
        )
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation comes from. source: the user's line as "file.py:12 (function)"; location: the same with the file's whole path;
    scope: the stack of name scopes, relative to the function's; primitive: JAX's operation. Empty if unknown.

    users: whether the line is outside of installed libraries.
    """

    source: str = ""
    location: str = ""
    scope: str = ""
    primitive: str = ""
    users: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a function, as an attribute."""

    name: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An attribute of an unknown kind, as text."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation: values are numbers, unique in their function."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[DeclaredType, ...]
    attributes: Mapping[str, Any]
    blocks: tuple[Block, ...]
    place: Place


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Arguments, operations in order, and the values its terminator gives back; captured: the outer values that it reads."""

    arguments: tuple[int, ...]
    types: tuple[DeclaredType, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    captured: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function: its body, the attributes of arguments and results, and the arguments' names (empty if unknown)."""

    name: str
    body: Block
    output_types: tuple[DeclaredType, ...]
    argument_attributes: tuple[Mapping[str, Any], ...]
    result_attributes: tuple[Mapping[str, Any], ...]
    argument_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its name, its functions by name, and for how many devices it is (0: it does not say)."""

    name: str
    functions: Mapping[str, Function] = field(default_factory=dict)
    devices: int = 0


def captured_by(arguments: tuple[int, ...], operations: tuple[Operation, ...], outputs: tuple[int, ...]) -> tuple[int, ...]:
    """The values that a block reads and does not define, in the order of their first use."""
    defined = {*arguments, *(v for operation in operations for v in operation.results)}
    return tuple(dict.fromkeys(v for v in _read(operations, outputs) if v not in defined))


def calls_host(module: Module, block: Block) -> bool:
    """Whether a block, or a function that it calls, calls the host."""
    return any(
        operation.attributes.get("call_target_name") in HOST_CALLS
        or any(calls_host(module, inner) for inner in operation.blocks)
        or any(calls_host(module, module.functions[s.name].body) for s in _called(module, operation))
        for operation in block.operations
    )


def waits_for_host(module: Module, block: Block) -> bool:
    """Whether a block, or a function of the module, calls the host for results."""
    return any(
        (operation.attributes.get("call_target_name") in HOST_CALLS and bool(operation.results))
        or any(waits_for_host(module, inner) for inner in operation.blocks)
        for operation in block.operations
    )


def _called(module: Module, operation: Operation) -> list[Symbol]:
    return [s for s in operation.attributes.values() if isinstance(s, Symbol) and s.name in module.functions]


def _read(operations: tuple[Operation, ...], outputs: tuple[int, ...]) -> Iterator[int]:
    for operation in operations:
        yield from operation.operands
        for block in operation.blocks:
            yield from block.captured
    yield from outputs
