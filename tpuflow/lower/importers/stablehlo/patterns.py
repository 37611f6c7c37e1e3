"""Pattern matching of operations that JAX decomposes in StableHLO, so that both importers produce the same graph.

Operations are known by their form and by the primitive that their place names: the same arithmetic written out by a user stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.importers.stablehlo.module import Block, DeclaredType, ForeignType, Function, Module, Operation

Makers = Mapping[int, Operation]
EXP2, LOGISTIC, THREEFRY = "jax.exp2", "stablehlo.logistic", "jax.threefry2x32"


def recognise(module: Module) -> Module:
    """The module with the patterns below in the place of their last operations."""
    functions = {name: replace(f, body=_block(_alone(f.body) if module.devices == 1 else f.body)) for name, f in module.functions.items()}
    threefry = {name for name, f in functions.items() if _is_threefry(f)}
    return replace(module, functions={name: replace(f, body=_calls(f.body, threefry)) for name, f in functions.items()})


def _alone(block: Block) -> Block:
    """A block of a module for one device, with partition and replica ids replaced by 0 (`jax.pmap` over one device reads them)."""
    number = {"value": np.zeros((), np.uint32)}
    operations = (replace(o, blocks=tuple(map(_alone, o.blocks))) if o.blocks else o for o in block.operations)
    return replace(
        block,
        operations=tuple(replace(o, name="stablehlo.constant", attributes=number) if o.name in _DEVICE else o for o in operations),
    )


_DEVICE = ("stablehlo.partition_id", "stablehlo.replica_id")


def _block(block: Block) -> Block:
    makers = {v: operation for operation in block.operations for v in operation.results}
    return replace(block, operations=tuple(_operation(operation, makers) for operation in block.operations))


def _operation(operation: Operation, makers: Makers) -> Operation:
    if operation.blocks:
        return replace(operation, blocks=tuple(map(_block, operation.blocks)))
    match = _PATTERNS.get(operation.name)
    return operation if match is None else match(operation, makers) or operation


def _exp2(last: Operation, makers: Makers) -> Operation | None:
    """exp(ln 2 * x), of which all is `exp2`."""
    product = makers.get(last.operands[0])
    if last.place.primitive != "exp2" or product is None or product.name != "stablehlo.multiply" or product.place.primitive != "exp2":
        return None
    factors = [v for v in product.operands if _constant(v, makers, "exp2", "") is None]
    real = isinstance(last.types[0], TensorType)  # of complex numbers neither factor is a constant
    return replace(last, name=EXP2, operands=tuple(factors)) if real and len(factors) == 1 else None


def _logistic(last: Operation, makers: Makers) -> Operation | None:
    """1 / (1 + exp(-x)), of which the ones are `logistic`."""
    one, below = last.operands
    total = makers.get(below)
    if total is None or total.name != "stablehlo.add" or _constant(one, makers, "logistic") != 1:
        return None
    parts = [v for v in total.operands if _constant(v, makers, "logistic") is None]
    power = makers.get(parts[0]) if len(parts) == 1 else None
    opposite = makers.get(power.operands[0]) if power is not None and power.name == "stablehlo.exponential" else None
    if opposite is None or opposite.name != "stablehlo.negate":
        return None
    return replace(last, name=LOGISTIC, operands=opposite.operands)


def _whole(last: Operation, makers: Makers) -> Operation | None:
    """A CHLO operation given as a composite whose decomposition uses 64-bit integers."""
    name = last.attributes.get("name")
    return replace(last, name=name, attributes={}) if name in _COMPOSITES else None


_COMPOSITES = ("chlo.mulhi",)


def _words(last: Operation, makers: Makers) -> Operation | None:
    """64-bit integers that are bits of u32 stay their words, u32[..., 2]: the state of a generator of random bits."""
    kind, made = last.types[0], makers.get(last.operands[0])
    if (words := _words_of(kind)) is not None:
        return replace(last, name="stablehlo.reshape", types=(words,))
    before = made.types[made.results.index(last.operands[0])] if made is not None else None
    return replace(last, name="stablehlo.reshape") if _words_of(before) is not None else None


def _random_bits(last: Operation, makers: Makers) -> Operation | None:
    state, bits = last.types
    words = _words_of(state)
    return None if words is None else replace(last, types=(words, bits))


def _words_of(kind: DeclaredType | None) -> TensorType | None:
    """The type of the words of an array of ui64; None for other types."""
    counter = kind.counter if isinstance(kind, ForeignType) else None
    return None if counter is None else TensorType(counter.dtype, (*counter.shape, 2))


_PATTERNS: Mapping[str, Callable[[Operation, Makers], Operation | None]] = {
    "stablehlo.composite": _whole,
    "stablehlo.bitcast_convert": _words,
    "stablehlo.rng_bit_generator": _random_bits,
    "stablehlo.exponential": _exp2,
    "stablehlo.divide": _logistic,
}


def _constant(value: int, makers: Makers, *primitives: str) -> complex | None:
    """The number that a constant of one of some primitives is everywhere; after XLA's passes constants are of none, ""."""
    made = makers.get(value)
    if made is not None and made.name == "stablehlo.broadcast_in_dim":
        made = makers.get(made.operands[0])
    if made is None or made.name != "stablehlo.constant" or made.place.primitive not in primitives:
        return None
    data = made.attributes["value"]
    return data.item() if isinstance(data, np.ndarray) and data.shape == () else None


# --- functions --------------------------------------------------------------------------------------------------------

_ROUNDS = ([13, 15, 26, 6], [17, 29, 16, 24])
_PARITY = 0x1BD11BDA


def _is_threefry(function: Function) -> bool:
    """Whether a function is JAX's threefry-2x32 for CPUs (a loop over five groups of rounds), by its name, types and constants."""
    types = function.body.types
    if not function.name.startswith("threefry2x32") or len(types) != 4 or len(function.output_types) != 2:
        return False
    constants = [o.attributes["value"] for o in function.body.operations if o.name == "stablehlo.constant"]
    found = [c.tolist() for c in constants if isinstance(c, np.ndarray)]
    words = all(isinstance(t, TensorType) and str(t.dtype) == "u32" for t in (*types, *function.output_types))
    return words and _PARITY in found and all(rounds in found for rounds in _ROUNDS)


def _calls(block: Block, threefry: set[str]) -> Block:
    """The block with operations for the calls of known functions, in inner blocks too."""
    return replace(block, operations=tuple(_call(operation, threefry) for operation in block.operations))


def _call(operation: Operation, threefry: set[str]) -> Operation:
    if operation.blocks:
        return replace(operation, blocks=tuple(_calls(block, threefry) for block in operation.blocks))
    callee = operation.attributes.get("callee")
    known = operation.name == "func.call" and callee is not None and callee.name in threefry
    return replace(operation, name=THREEFRY, attributes={}) if known else operation
