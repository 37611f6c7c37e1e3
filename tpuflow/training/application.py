"""`Application`: the function `apply` that a user's `loss_fn` calls the model with, inside of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tpuflow import amp
from tpuflow.amp.policy import cast_floats
from tpuflow.training.adapters.model import Inputs, Model

LossFn = Callable[[Any, Any, Any, Any], Any]
"""(apply, params, batch, rngs) -> loss, or (loss, scalars by name)."""


class Application:
    """`apply(params, *args, rngs=None, train=..., mutable=(), **kwargs)` -> the model's outputs, floats in fp32, under the policy.

    Variables that the model carries (batch statistics, a recurrent state) are passed to it, and updated from call to call. rngs: random
    keys by stream; the step's if not given. train: training or evaluation mode; the step's if not given. mutable: names of sown collections
    (nnx: of types of variables), which are then returned too: (outputs, {name: tree}). Other keyword arguments are passed to the model;
    `method=` chooses its method.
    """

    def __init__(self, model: Model, policy: amp.Policy, carried: Any, rngs: Any, *, train: bool):
        self.carried = carried
        self._model, self._policy, self._rngs, self._train = model, policy, rngs, train

    def __call__(
        self, params: Any, /, *args: Any, rngs: Any = None, train: bool | None = None, mutable: Sequence[str] | str = (), **kwargs: Any
    ) -> Any:
        wanted = (mutable,) if isinstance(mutable, str) else tuple(mutable)
        outputs, sown = self.call(params, (args, kwargs), self._rngs if rngs is None else rngs, wanted, train=train)
        outputs = cast_floats(outputs, jnp.float32)
        return (outputs, cast_floats({name: sown.get(name, {}) for name in wanted}, jnp.float32)) if wanted else outputs

    def call(self, params: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), *, train: bool | None = None) -> tuple[Any, Any]:
        """(outputs, sown) of the model under the policy; what the policy keeps in fp32 (batch normalisation, statistics) is not cast."""
        model, policy = self._model, self._policy
        training = self._train if train is None else train
        norms = model.norms(params, self.carried) if policy.keeps_norms else False
        cast = amp.autocast(model.train_apply if training else model.eval_apply, policy, keep=(norms, policy.keeps_statistics))
        outputs, self.carried, sown = cast(params, self.carried, policy.cast_inputs(inputs), rngs, wanted)
        return outputs, sown
