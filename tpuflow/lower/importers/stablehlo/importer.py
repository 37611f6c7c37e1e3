"""From the bytes of a StableHLO module to a graph, with what the module says of its `main`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpuflow.errors import ModuleError
from tpuflow.isa.calls import Call
from tpuflow.isa.collectives import MeshAxis
from tpuflow.jaxprs.partitioner import MEMORY_KIND
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType
from tpuflow.lower.importers.stablehlo import rules
from tpuflow.lower.importers.stablehlo.compat import read_module
from tpuflow.lower.importers.stablehlo.constants import clone_captured_constants
from tpuflow.lower.importers.stablehlo.module import Function, Module, TokenType, port_type, waits_for_host
from tpuflow.lower.importers.stablehlo.patterns import recognise
from tpuflow.lower.importers.stablehlo.walk import RULES, Context, Region
from tpuflow.lower.operations.complex import Complex, ComplexType, from_port, to_port
from tpuflow.lower.operations.memories import HOST_KINDS
from tpuflow.lower.shards import UNCUT, Cuts

__all__ = ["RULES", "Imported", "lower_stablehlo", "rules"]


@dataclass(frozen=True, slots=True)
class Imported:
    """A module's `main` as a graph, with what the module says of its arguments and results.

    donated: of each argument, whether the program may overwrite it (`tf.aliasing_output`, `jax.buffer_donor`). aliases: of each argument,
    the result that `tf.aliasing_output` gives its buffer to (None: no particular one). input_types, output_types: as the module declares
    them, in its order; complex_outputs: of each result, whether it is the two planes of a complex one; token_outputs: whether it is a
    token, an array of nothing here. mesh, cuts: of a partitioned module the axes of its mesh that have several chips, and into what pieces
    its arguments and results are cut; stacked_outputs: of each result, whether it is the devices' own ones, along an axis before
    its own. host_inputs, host_outputs: whether it is in the host's memory before, and after the program (`mhlo.memory_kind`). Names are the
    graph's (`graph.input_names`, `graph.output_names`).
    """

    graph: Graph
    calls: tuple[Call, ...]
    donated: tuple[bool, ...]
    aliases: tuple[int | None, ...]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    complex_outputs: tuple[bool, ...] = ()
    token_outputs: tuple[bool, ...] = ()
    mesh: tuple[MeshAxis, ...] = ()
    cuts: Cuts = UNCUT
    stacked_outputs: tuple[bool, ...] = ()
    host_inputs: tuple[bool, ...] = ()
    host_outputs: tuple[bool, ...] = ()


def lower_stablehlo(
    module: bytes | str | Module,
    name: str = "",
    *,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    host_functions: Sequence[Callable[..., Any]] = (),
    mesh: Mapping[str, int] | None = None,
    trusted: bool = False,
    complex_ports: bool = False,
) -> Imported:
    """The graph of the `main` of a StableHLO module: a portable artifact (VHLO bytecode, as `jax.export` and PJRT give it), MLIR bytecode,
    or MLIR text, or one that is read already. Calls of other functions are inlined.

    name: the graph's; empty: the module's. input_names, output_names: empty: as the module has them. host_functions: what
    calls of the host call, by their numbers. mesh: the axes (and their sizes) of the mesh whose devices all run the module, numbered
    row-major. trusted: the bytes are MLIR's own, such as JAX hands over: others are first read by another process (0.3 s), because
    jaxlib crashes on some that are damaged. complex_ports: arguments and results may be complex, and are f32[2, ...] then, real plane
    first; otherwise they are refused.

    Raises:
      ModuleError: the bytes are no module, or damaged.
      UnsupportedPrimitiveError: an operation, or a form of one, has no rule.
      UnsupportedDtypeError: a value has a type that the device does not have.
      CompileError: it is far too large.
    """
    read = module if isinstance(module, Module) else read_stablehlo(module, trusted=trusted)
    main = _main(read)
    names = tuple(input_names) or _distinct(main.argument_names, "argument")
    port = partial(port_type, complex_ports=complex_ports)
    types = tuple(port(t, where) for t, where in zip(main.body.types, names, strict=True))
    given = tuple(output_names) or _distinct([a.get("jax.result_info", "") for a in main.result_attributes], "result")
    output_types = tuple(port(t, where) for t, where in zip(main.output_types, given, strict=True))
    b = Builder(name or read.name, types, names)
    b.mesh = mesh or {}
    context = Context(read, tuple(host_functions), (main.name,))
    b.waits = bool(mesh) or any(waits_for_host(read, function.body) for function in read.functions.values())
    inputs = [from_port(b, x) if isinstance(t, ComplexType) else x for x, t in zip(b.inputs, main.body.types, strict=True)]
    results = Region(context, main.body, {}, "").run(b, inputs)
    outputs = [to_port(b, x) if isinstance(x, Complex) else x for x in results]
    for number, value in enumerate(v for _, values in b.calls for v in values):
        b.outfeed(number, value)
    return Imported(
        graph=b.finish(outputs, given),
        calls=tuple(call for call, _ in b.calls),
        donated=tuple("tf.aliasing_output" in a or a.get("jax.buffer_donor") is True for a in main.argument_attributes),
        aliases=tuple(a.get("tf.aliasing_output") for a in main.argument_attributes),
        input_types=types,
        output_types=output_types,
        complex_outputs=tuple(isinstance(x, Complex) for x in results),
        token_outputs=tuple(isinstance(t, TokenType) for t in main.output_types),
        host_inputs=tuple(a.get(MEMORY_KIND) in HOST_KINDS for a in main.argument_attributes),
        host_outputs=tuple(a.get(MEMORY_KIND) in HOST_KINDS for a in main.result_attributes),
    )


def read_stablehlo(module: bytes | str, *, trusted: bool = False) -> Module:
    """A module as plain data, with the patterns of `patterns.recognise` restored. Arguments and errors are as of `lower_stablehlo`."""
    return recognise(clone_captured_constants(read_module(module, trusted=trusted)))


def _main(module: Module) -> Function:
    """Where the module begins: its `main`, or its only function."""
    functions = module.functions
    if "main" in functions or len(functions) == 1:
        return functions.get("main") or next(iter(functions.values()))
    raise ModuleError(f"the module has no function @main, only {', '.join(f'@{n}' for n in list(functions)[:10]) or 'none at all'}.")


def _distinct(names: Sequence[str], kind: str) -> tuple[str, ...]:
    """Distinct names: an empty or repeated one is replaced by its kind and number."""
    first: Mapping[str, int] = {n: i for i, n in reversed(list(enumerate(names)))}
    return tuple(n if n and first[n] == i else f"{kind} {i}" for i, n in enumerate(names))
