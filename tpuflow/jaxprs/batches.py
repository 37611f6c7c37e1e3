"""Operations on batches that XLA's partitioner has every device compute whole, in the form in which it cuts them instead.

They are independent along their leading axes. Each is, or becomes, a custom call whose target XLA knows to be "batch partitionable", as
those are by which JAX calls LAPACK. The importer of StableHLO has a rule for every one of these targets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

TOP_K, FFT = "tpuflow_top_k", "tpuflow_fft"
"""The targets of what was `chlo.top_k`, with the lengths of its results for k, and `stablehlo.fft`, with its kind and lengths as words."""


def cut_batches(module: Any) -> None:
    """Let XLA cut every such operation of a module (MLIR) along its batch axes."""
    _register()
    found: list[tuple[Any, int]] = []

    def visit(op: Any) -> Any:
        if (own := _OWN_AXES.get(_name_of(op))) and (batch := len(op.operands[0].type.shape) - own(op)) > 0:
            found.append((op, batch))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        for op, batch in found:
            call = _CALLED[op.name](op) if op.name in _CALLED else op
            for name, values in (("operand_layouts", call.operands), ("result_layouts", call.results)):
                call.attributes[name] = ir.ArrayAttr.get([_row_major(len(value.type.shape)) for value in values])
            call.attributes[_RULE] = ir.Attribute.parse(_sharding_rule(call, batch))
            call.attributes[_FRONTEND] = ir.DictAttr.get({"num_batch_dims": ir.StringAttr.get(str(batch))})


_CALL, _TARGET, _RULE, _FRONTEND = "stablehlo.custom_call", "call_target_name", "sdy.sharding_rule", "mhlo.frontend_attributes"
_MATRICES = ("Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors", "Qr")
"""The targets of JAX's calls for batches of matrices on TPUs."""
_OWN_AXES: Mapping[str, Callable[[Any], int]] = {
    "chlo.top_k": lambda op: 1,
    "stablehlo.fft": lambda op: len(op.attributes["fft_length"]),
    **dict.fromkeys(_MATRICES, lambda op: 2),
}
"""Operation, or target of a custom call -> how many axes of its first operand are not of the batch: the last ones."""


@functools.cache
def _register() -> None:
    for target in (TOP_K, FFT, *_MATRICES):
        xla_client.register_custom_call_as_batch_partitionable(target)


def _name_of(op: Any) -> str:
    return op.attributes[_TARGET].value if op.name == _CALL else op.name


def _called_top_k(op: Any) -> Any:
    return _call_instead(op, TOP_K, "")


def _called_fft(op: Any) -> Any:
    kind = stablehlo.FftTypeAttr(op.attributes["fft_type"]).value
    return _call_instead(op, FFT, " ".join(map(str, (kind, *op.attributes["fft_length"]))))


_CALLED: Mapping[str, Callable[[Any], Any]] = {"chlo.top_k": _called_top_k, "stablehlo.fft": _called_fft}
"""Operation -> the call that it becomes."""


def _call_instead(op: Any, target: str, config: str) -> Any:
    """A custom call in the place of an operation."""
    attributes: dict[str, ir.Attribute] = {_TARGET: ir.StringAttr.get(target), "backend_config": ir.StringAttr.get(config)}
    types, point = [result.type for result in op.results], ir.InsertionPoint(op)
    call = ir.Operation.create(_CALL, types, list(op.operands), attributes, loc=op.location, ip=point)
    for old, new in zip(op.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()
    return call


def _row_major(rank: int) -> Any:
    """A layout, of which XLA's partitioner wants one for each array."""
    return ir.Attribute.parse(f"dense<{[*reversed(range(rank))]}> : tensor<{rank}xindex>")


def _sharding_rule(call: Any, batch: int) -> str:
    """Shardy's rule for a call: operands and results have the batch axes in common, and every other axis is one of its own."""
    sizes = list(call.operands[0].type.shape[:batch])
    operands, results = (", ".join(_factors(values, batch, sizes)) for values in (call.operands, call.results))
    lengths = ", ".join(f"{_letter(i)}={n}" for i, n in enumerate(sizes))
    return f"#sdy.op_sharding_rule<({operands})->({results}) {{{lengths}}}, custom>"


def _factors(values: Any, batch: int, sizes: list[int]) -> Iterator[str]:
    """The letters of arrays' axes; the lengths of those that are not of the batch are put behind `sizes`."""
    for value in values:
        own = value.type.shape[batch:]
        letters = map(_letter, itertools.chain(range(batch), range(len(sizes), len(sizes) + len(own))))
        sizes.extend(own)
        yield f"[{', '.join(letters)}]"


def _letter(factor: int) -> str:
    """Shardy's name of a factor: i, j, ... z, z_1, z_2, ..."""
    return chr(ord("i") + factor) if factor < 18 else f"z_{factor - 17}"
