"""`tpuflow.torch.train_step`: forward, backward and update of a PyTorch module as one pure function, which is one Program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode

from tpuflow import amp
from tpuflow.errors import ConfigError, TpuflowError, UnsupportedPrimitiveError, a_thing, one_line
from tpuflow.torch.arrays import NARROW, constant
from tpuflow.torch.graphs import decompositions, keep_no_indices, plain_attention
from tpuflow.torch.interpreting import Interpreter
from tpuflow.torch.optimizers import TorchOptimizer

_WIDE = {np.dtype(np.int32): torch.int64, **{dtype: kind for kind, dtype in NARROW.items() if kind not in (torch.int64, torch.int32)}}
"""What a model is given for an array of the device: whole numbers as PyTorch has them, in 64 bits."""

State = dict[str, Any]


def train_step(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | optax.GradientTransformation,
    *,
    policy: str | amp.Policy = "fp32",
    seed: int = 0,
) -> TorchStep:
    """A training step of a PyTorch module: `step(state, batch) -> (new state, {"loss": loss})`, pure, and `step.state` to begin with.

    It is an ordinary function of arrays, so that `tpuflow.train(step, data, state=step.state)`, `tpuflow.sink`, `tpuflow.jit`, `estimate`,
    `check` and plain `jax.jit` take it. The module is traced in the mode it is in (`model.train()`), for each batch shape once; it stays as
    it is until `step.load_into(state)`.

    Args:
      model: the module; its parameters and buffers are copied into the state.
      loss: f(outputs, targets) -> a scalar, for batches (inputs, targets); of a batch that is a mapping, whose entries are the arguments
        of the model's call, it gets the whole batch. Inputs are one array, a tuple of arguments, or a mapping.
      optimizer: SGD, Adam or AdamW of torch.optim over parameters of the model, with their groups, or an Optax transformation of {name:
        array}.
      policy: precision, applied with `tpuflow.autocast`, and its loss scale.
      seed: of dropout and the like.

    Raises:
      ConfigError: an argument is no module, function or known optimizer.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"train_step: expected a torch.nn.Module, got {a_thing(model)}.")
    if not callable(loss):
        raise ConfigError(f"train_step: loss must be a function (outputs, targets) -> scalar, got {a_thing(loss)}.")
    return TorchStep(model, loss, optimizer, amp.get_policy(policy), seed)


class TorchStep:
    """The step that `train_step` makes."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], optimizer: Any, policy: amp.Policy, seed: int):
        self.__name__ = f"{type(model).__name__}_step"
        self._model, self._loss, self._policy, self._seed = model, loss, policy, seed
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._torch = None if isinstance(optimizer, optax.GradientTransformation) else TorchOptimizer(optimizer, names)
        self._trained = self._torch.names if self._torch else tuple(n for n, p in model.named_parameters() if p.requires_grad)
        inner = self._torch.transformation() if self._torch else optimizer
        self._optimizer = amp.with_loss_scale(inner, policy.loss_scale)
        self._graphs: dict[Any, _Graph] = {}

    @property
    def state(self) -> State:
        """What the module and the optimizer hold now: parameters and buffers by name, the optimizer's state, a random key's words."""
        params = {name: constant(p, name) for name, p in self._model.named_parameters()}
        buffers = {name: constant(b, name) for name, b in self._model.named_buffers()}
        params = amp.cast_floats(params, jnp.dtype(self._policy.param_dtype))
        trained = self._optimizer.init(self._updated(params))
        return {"params": params, "buffers": buffers, "optimizer": trained, "key": jax.random.key_data(jax.random.key(self._seed))}

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """One step; pure."""
        key, next_key = jax.random.split(jax.random.wrap_key_data(state["key"]))
        found = amp.find_state(state["optimizer"])
        scale = jnp.ones((), jnp.float32) if found is None else found.scale
        graph = self._graph(batch)
        compute = amp.autocast(graph, self._policy, keep=(False, False, False, True))
        loss, gradients, buffers = compute(state["params"], state["buffers"], batch, scale, jax.random.key_data(key))
        trained = self._updated(state["params"])
        gradients = {name: gradients[name].astype(p.dtype) if name in gradients else jnp.zeros_like(p) for name, p in trained.items()}
        changes, optimizer = self._optimizer.update(gradients, state["optimizer"], trained)
        params = {**state["params"], **optax.apply_updates({n: state["params"][n] for n in trained}, changes)}  # type: ignore[dict-item]
        new = {"params": params, "buffers": {**state["buffers"], **buffers}, "optimizer": optimizer, "key": jax.random.key_data(next_key)}
        return new, {"loss": loss}

    def _updated(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that the optimizer updates, in fp32: it computes in fp32 whatever type they are kept in."""
        return amp.cast_floats({name: params[name] for name in self._trained}, jnp.float32)

    def load_into(self, state: State, model: torch.nn.Module | None = None) -> None:
        """Write a state's values into the module (or another one with the same names), and into the optimizer of torch.optim.

        Raises:
          ConfigError: the state or the module has other names or shapes.
        """
        target = self._model if model is None else model
        values = {**state["params"], **state["buffers"]}
        tensors = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        if wrong := sorted(n for n in values.keys() | tensors.keys() if _shape(values.get(n)) != _shape(tensors.get(n))):
            raise ConfigError(
                f"load_into: state and module differ in {', '.join(wrong[:8])}; give a state of this step, and a module like its own."
            )
        for name, value in values.items():
            _copy(value, tensors[name])
        if self._torch is not None and model is None:
            found = amp.find_state(state["optimizer"])
            self._torch.load(state["optimizer"] if found is None else found.inner, _copy)

    def _graph(self, batch: Any) -> _Graph:
        leaves, tree = jax.tree.flatten(batch)
        key = (tree, tuple((tuple(jnp.shape(leaf)), jnp.result_type(leaf)) for leaf in leaves), self._model.training)
        if key not in self._graphs:
            self._graphs[key] = _capture(self._model, self._loss, batch, self._trained)
        return self._graphs[key]


def _shape(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def _copy(array: Any, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_dlpack(jnp.asarray(array)))


# --- the graph of loss and gradients ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Graph:
    """(parameters, buffers, batch, scale, key's words) -> (loss, gradients of the scaled loss, changed buffers), by name."""

    interpreter: Interpreter
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    changed: tuple[str, ...]
    gradients: tuple[str, ...]

    def __call__(self, params: Mapping[str, Any], buffers: Mapping[str, Any], batch: Any, scale: Any, key: Any) -> tuple[Any, Any, Any]:
        inputs = [*(params[n] for n in self.params), *(buffers[n] for n in self.buffers), *jax.tree.leaves(batch), scale]
        outputs = self.interpreter(inputs, jax.random.wrap_key_data(key))
        changed, (_, loss), gradients = _cut(outputs, len(self.changed), 2)
        return loss, dict(zip(self.gradients, gradients, strict=True)), dict(zip(self.changed, changed, strict=True))


def _cut(values: list[Any], *counts: int) -> tuple[list[Any], ...]:
    parts = []
    for count in counts:
        parts.append(values[:count])
        values = values[count:]
    return (*parts, values)


class _Scaled(torch.nn.Module):
    """The scaled loss, and the loss, of a batch's leaves and the scale; parameters and buffers under flat names, shared ones once."""

    def __init__(
        self, model: torch.nn.Module, loss: Callable[..., torch.Tensor], tree: Any, trained: tuple[str, ...], mode: FakeTensorMode
    ):
        super().__init__()
        self._call = (model, loss, tree)
        self.names = [n for n, _ in model.named_parameters()]
        self.buffer_names = [n for n, _ in model.named_buffers()]
        for place, (name, parameter) in enumerate(model.named_parameters()):
            self.register_parameter(f"p{place}", torch.nn.Parameter(mode.from_tensor(parameter.detach()), name in trained))
        for place, (_, buffer) in enumerate(model.named_buffers()):
            self.register_buffer(f"b{place}", mode.from_tensor(buffer))

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model, loss, tree = self._call
        tensors = dict(zip(self.names, (getattr(self, f"p{i}") for i in range(len(self.names))), strict=True))
        tensors |= dict(zip(self.buffer_names, (getattr(self, f"b{i}") for i in range(len(self.buffer_names))), strict=True))
        batch = jax.tree.unflatten(tree, leaves[:-1])
        args, kwargs, rest = _arguments(batch)
        outputs = torch.func.functional_call(model, tensors, args, kwargs, tie_weights=True)
        found = loss(outputs, rest)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ConfigError(f"train_step: the loss must be a scalar tensor, got {a_thing(found)}; reduce it, with .mean().")
        return found.reshape(()).float() * leaves[-1], found.detach().reshape(()).float()


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(args, kwargs, what the loss gets) of a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError(f"train_step: expected batches (inputs, targets), or mappings of the model's arguments, got {a_thing(batch)}.")
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs), targets
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, targets


def _capture(model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], batch: Any, trained: tuple[str, ...]) -> _Graph:
    """The graph for batches of this form.

    Raises:
      UnsupportedPrimitiveError: the model or its loss asks for values, or uses what has no row.
    """
    leaves, tree = jax.tree.flatten(batch)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    scaled = _Scaled(model, loss, tree, trained, mode)
    with mode:
        inputs = [torch.empty(tuple(jnp.shape(leaf)), dtype=_WIDE[np.dtype(jnp.result_type(leaf))]) for leaf in leaves]
        inputs.append(torch.ones(()))
    try:
        with plain_attention():
            module, signature = aot_export_module(scaled, inputs, decompositions=decompositions(), trace_joint=True, output_loss_index=0)
    except TpuflowError:
        raise
    except Exception as error:
        raise UnsupportedPrimitiveError(
            f"train_step: {type(model).__name__} cannot be made one graph, without values: {type(error).__name__}: {one_line(error)}. "
            "Where it asks for values (if, .item(), a shape that depends on data), use torch.where; or use torch.compile(model, "
            "backend='tpuflow'), which breaks graphs there."
        ) from error
    assert isinstance(module, torch.fx.GraphModule) and signature.backward_signature is not None
    keep_no_indices(module)
    own = {f"p{i}": name for i, name in enumerate(scaled.names)} | {f"b{i}": name for i, name in enumerate(scaled.buffer_names)}
    gradients = signature.backward_signature.gradients_to_parameters
    outputs = list(next(node for node in module.graph.nodes if node.op == "output").args[0])
    return _Graph(
        Interpreter(module), tuple(scaled.names), tuple(scaled.buffer_names),
        tuple(own[name] for name in signature.buffers_to_mutate.values()),
        tuple(own[gradients[str(node)]] for node in outputs if str(node) in gradients),
    )  # fmt: skip
