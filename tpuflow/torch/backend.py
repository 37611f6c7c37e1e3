"""`torch.compile(model, backend="tpuflow")`: graphs that dynamo captures, compiled for the simulated device and run there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tpuflow import amp
from tpuflow.chips import Chip
from tpuflow.errors import unknown
from tpuflow.stages.compiling import jit
from tpuflow.torch.arrays import from_device, to_device
from tpuflow.torch.breaks import warn_of_break
from tpuflow.torch.graphs import decompositions, partition, plain_attention
from tpuflow.torch.interpreting import Interpreter


@dataclass(frozen=True, slots=True)
class Options:
    """What `torch.compile(..., options={...})` may say to the backend; each as for `tpuflow.jit`."""

    chip: str | Chip = "generic"
    policy: str | amp.Policy | None = None
    engine: str = "fast"
    fidelity: str = "native"

    def as_dict(self) -> dict[str, Any]:
        """Keyword arguments of `tpuflow.jit`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def get_options(given: Mapping[str, Any] | None) -> Options:
    """Raises ConfigError for an option that is unknown or does not fit."""
    known = [f.name for f in fields(Options)]
    for name in given or {}:
        if name not in known:
            raise unknown("option of the tpuflow backend", name, known)
    options = Options(**(given or {}))
    jit(lambda: None, **options.as_dict())  # checks them
    return options


class GraphFunction:
    """An ATen graph on the device, called with PyTorch's tensors: one Program for each combination of sizes."""

    def __init__(self, graph_module: torch.fx.GraphModule, name: str, options: Options):
        self._interpreter = Interpreter(graph_module)
        nodes = list(graph_module.graph.nodes)
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        self._results: list[Any] = list(next(node for node in nodes if node.op == "output").args[0])
        self._numbers: dict[Any, dict[Any, Any]] = {}

        def traced(sizes: tuple[tuple[int, Any], ...], arrays: Sequence[Any], key: Any) -> list[Any]:
            """The results that have to be computed; numbers among them depend on sizes alone and are kept aside."""
            results = dict(zip(self._results, self._interpreter(_merged(sizes, arrays), key), strict=True))
            self._numbers[sizes] = {node: r for node, r in results.items() if not isinstance(r, jax.Array)}
            return [results[node] for node in self._computed(sizes)]

        traced.__name__ = name
        self._jitted = jit(traced, static_argnums=(0,), **options.as_dict())

    def _computed(self, sizes: Any) -> list[Any]:
        """Nodes of results that are neither numbers nor inputs, each once."""
        return list(dict.fromkeys(n for n in self._results if n not in self._numbers[sizes] and n not in self._placeholders))

    def __call__(self, *inputs: Any) -> list[Any]:
        """Outputs of the graph for its inputs; an output that is an input is that tensor itself."""
        given = dict(zip(self._placeholders, inputs, strict=True))
        sizes = tuple((i, v) for i, v in enumerate(inputs) if not isinstance(v, torch.Tensor))
        arrays = [to_device(v, str(n.target)) for n, v in given.items() if isinstance(v, torch.Tensor)]
        outputs = self._jitted(sizes, arrays, draw_key() if self._interpreter.draws else None)
        computed = zip(self._computed(sizes), outputs, strict=True)
        given |= {node: from_device(array, node.meta["val"].dtype) for node, array in computed} | self._numbers[sizes]
        return [given[node] for node in self._results]


def _merged(sizes: Sequence[tuple[int, Any]], arrays: Sequence[Any]) -> list[Any]:
    inputs = list(arrays)
    for place, value in sizes:
        inputs.insert(place, value)
    return inputs


def draw_key() -> Any:
    """A key from PyTorch's generator: `torch.manual_seed` makes a run repeatable."""
    return jax.random.key(int(torch.randint(0, 2**31 - 1, ())))


def _compiler(name: str, options: Options) -> Callable[..., Any]:
    def compile_graph(graph_module: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(GraphFunction(graph_module, name, options))

    return compile_graph


def backend(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """The dynamo backend: a captured graph -> a function of tensors that runs forward and backward on the simulated device.

    Raises:
      ConfigError: an option is unknown or does not fit.
      UnsupportedPrimitiveError: an operation has no row in the table of ATen operations.
    """
    chosen = get_options(options)
    warn_of_break(graph_module)
    compile_graph = aot_autograd(
        fw_compiler=_compiler("forward", chosen),
        bw_compiler=_compiler("backward", chosen),
        inference_compiler=_compiler("inference", chosen),
        decompositions=decompositions(),
        partition_fn=partition,
    )
    with plain_attention():
        return compile_graph(graph_module, example_inputs)
