"""PyTorch's optimizers as Optax transformations: the same update of each parameter, with the hyperparameters of its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch

from tpuflow.errors import ConfigError, a_thing
from tpuflow.torch.arrays import constant

Named = Mapping[str, Any]


class OptimizerState(NamedTuple):
    """Steps done, the rate of each group (to be changed as one likes), and what is kept for each parameter, by PyTorch's names."""

    step: jax.Array
    rates: jax.Array
    slots: dict[str, dict[str, jax.Array]]


@dataclass(frozen=True, slots=True)
class _Update:
    """One parameter's part of a step: what an optimizer's formula reads."""

    parameter: Any
    gradient: Any
    slots: Named
    step: Any
    rate: Any
    group: Named


@dataclass(frozen=True, slots=True)
class _Formula:
    """`slots(group)`: the names of what is kept for each parameter; `update`: (change of the parameter, new slots)."""

    slots: Callable[[Named], tuple[str, ...]]
    update: Callable[[_Update], tuple[Any, dict[str, Any]]]


def _sgd(u: _Update) -> tuple[Any, dict[str, Any]]:
    group, momentum = u.group, u.group["momentum"]
    gradient = _decayed(u)
    if not momentum:
        return -u.rate * gradient, {}
    running = momentum * u.slots["momentum_buffer"] + (1 - group["dampening"]) * gradient
    if group["dampening"]:
        running = jnp.where(u.step == 1, gradient, running)  # the first gradient is not dampened
    direction = gradient + momentum * running if group["nesterov"] else running
    return -u.rate * direction, {"momentum_buffer": running}


def _adam(u: _Update) -> tuple[Any, dict[str, Any]]:
    group, (beta1, beta2) = u.group, u.group["betas"]
    decoupled = group.get("decoupled_weight_decay", False)
    gradient = -u.gradient if decoupled and group["maximize"] else u.gradient if decoupled else _decayed(u)
    first = u.slots["exp_avg"] + (1 - beta1) * (gradient - u.slots["exp_avg"])
    second = beta2 * u.slots["exp_avg_sq"] + (1 - beta2) * gradient * gradient
    slots = {"exp_avg": first, "exp_avg_sq": second}
    if group["amsgrad"]:
        second = slots["max_exp_avg_sq"] = jnp.maximum(u.slots["max_exp_avg_sq"], second)
    root = jnp.sqrt(second) / jnp.sqrt(_correction(beta2, u.step)) + group["eps"]
    change = -(u.rate / _correction(beta1, u.step)) * (first / root)
    if decoupled and group["weight_decay"]:
        change = change - u.rate * group["weight_decay"] * u.parameter
    return change, slots


def _decayed(u: _Update) -> Any:
    gradient = -u.gradient if u.group["maximize"] else u.gradient
    return gradient + u.group["weight_decay"] * u.parameter if u.group["weight_decay"] else gradient


def _correction(beta: float, step: Any) -> Any:
    """1 - beta^step without the cancellation it would suffer in fp32; PyTorch computes it in fp64."""
    return -jnp.expm1(step.astype(jnp.float32) * math.log(beta)) if beta else jnp.float32(1)


def _adam_slots(group: Named) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


_ADAM = _Formula(_adam_slots, _adam)
_FORMULAS: dict[type, _Formula] = {
    torch.optim.SGD: _Formula(lambda group: ("momentum_buffer",) if group["momentum"] else (), _sgd),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}


class TorchOptimizer:
    """An optimizer of torch.optim and what it means: the groups of the parameters it knows by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]):
        if type(optimizer) not in _FORMULAS:
            known = ", ".join(f"torch.optim.{kind.__name__}" for kind in _FORMULAS)
            raise ConfigError(f"optimizer: expected one of {known}, or an Optax one, got {a_thing(optimizer)}.")
        self._optimizer, self._formula = optimizer, _FORMULAS[type(optimizer)]
        self._groups: list[Named] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if type(optimizer) is torch.optim.AdamW:
            self._groups = [{**group, "decoupled_weight_decay": True} for group in self._groups]
        self._parameters: dict[str, tuple[int, torch.nn.Parameter]] = {}
        for place, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    shape = list(parameter.shape)
                    raise ConfigError(
                        f"optimizer: group {place} holds a parameter {shape} that the model does not have; make it of this model."
                    )
                self._parameters[names[parameter]] = (place, parameter)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it updates."""
        return tuple(name for name, (_, parameter) in self._parameters.items() if parameter.requires_grad)

    def transformation(self) -> optax.GradientTransformation:
        """The same optimizer for trees {name: array}, beginning with the state it has now."""
        return optax.GradientTransformation(self._init, self._update)  # type: ignore[arg-type]

    def _init(self, params: Named) -> OptimizerState:
        steps = [int(s["step"]) for s in self._optimizer.state.values() if "step" in s] or [0]
        if all("step" not in s for s in self._optimizer.state.values()) and self._optimizer.state:
            steps = [1]  # SGD does not count; all that matters is that the first gradient has been
        slots: dict[str, dict[str, jax.Array]] = {}
        for name, value in params.items():
            for slot in self._formula.slots(self._groups[self._parameters[name][0]]):
                slots.setdefault(slot, {})[name] = self._kept(name, slot, value)
        rates = jnp.asarray([float(group["lr"]) for group in self._groups], jnp.float32)
        return OptimizerState(jnp.int32(max(steps)), rates, slots)

    def _kept(self, name: str, slot: str, like: Any) -> jax.Array:
        kept = self._optimizer.state.get(self._parameters[name][1], {}).get(slot)
        return jnp.zeros(like.shape, like.dtype) if kept is None else constant(kept, f"{name}: {slot}")

    def _update(self, gradients: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        step, changes = state.step + 1, {}
        slots: dict[str, dict[str, Any]] = {slot: {} for slot in state.slots}
        for name, gradient in gradients.items():
            place = self._parameters[name][0]
            own = {slot: values[name] for slot, values in state.slots.items() if name in values}
            update = _Update(params[name], gradient, own, step, state.rates[place], self._groups[place])
            changes[name], new = self._formula.update(update)
            for slot, value in new.items():
                slots[slot][name] = value
        return changes, OptimizerState(step, state.rates, slots)

    def load(self, state: OptimizerState, tensors: Callable[[Any, torch.Tensor], None]) -> None:
        """Write a state back into the optimizer; `tensors(array, tensor)` copies."""
        for group, rate in zip(self._optimizer.param_groups, state.rates.tolist(), strict=True):
            if rate != float(jnp.float32(group["lr"])):  # a rate nobody changed stays what it was in fp64
                group["lr"] = rate
        for slot, values in state.slots.items():
            for name, value in values.items():
                self._load(name, slot, value, int(state.step), tensors)

    def _load(self, name: str, slot: str, value: Any, step: int, tensors: Callable[[Any, torch.Tensor], None]) -> None:
        parameter = self._parameters[name][1]
        own = self._optimizer.state[parameter]
        own[slot] = torch.empty_like(parameter)
        tensors(value, own[slot])
        if slot != "momentum_buffer":
            own["step"] = torch.tensor(float(step))
