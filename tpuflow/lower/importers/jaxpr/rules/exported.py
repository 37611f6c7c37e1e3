"""The rule of a call of what `jax.export` has exported, which is a StableHLO module."""

from __future__ import annotations

from typing import Any

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.importers.jaxpr.registry import lowers
from tpuflow.lower.operations.complex import Complex, Number, from_port, to_port


@lowers("call_exported", keys=True)
def _call_exported(b: Builder, *operands: Number, exported: Any) -> tuple[Number, ...]:
    """The module inlined, which takes the arguments that it uses; one for several platforms, first the number of one: the CPU's, or 0."""
    from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo

    platforms = exported.platforms
    number = platforms.index("cpu") if "cpu" in platforms else 0
    which = [b.scalar(number, S32)] if len(platforms) > 1 else []
    used = (operands[i] for i in exported.module_kept_var_idx)
    ports = [to_port(b, x) if isinstance(x, Complex) else x for x in used]
    imported = lower_stablehlo(exported.mlir_module_serialized, exported.fun_name, complex_ports=True)
    results = zip(b.inline(imported.graph, [*which, *ports]), imported.complex_outputs, strict=True)
    return tuple(from_port(b, x) if is_complex else x for x, is_complex in results)
