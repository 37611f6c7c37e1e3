"""The model's call inside a step, as losses of the user's own make it."""

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

    Variables that the model carries (batch statistics, a recurrent state) are at hand and move on from call to call. rngs: streams of
    random keys by name; those of the step if not given. train: training's mode or evaluation's; the step's own if not given. mutable: names
    of sown collections (nnx: of types of variables), which are then returned as well: (outputs, {name: tree}). Other keyword arguments
    are the model's, `method=` among them.
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
        """(outputs, sown) in the types that the policy gives them: what it keeps in fp32 (batch normalisation, statistics) is not cast."""
        model, policy = self._model, self._policy
        training = self._train if train is None else train
        norms = model.norms(params, self.carried) if policy.keeps_norms else False
        cast = amp.autocast(model.train_apply if training else model.eval_apply, policy, keep=(norms, policy.keeps_statistics))
        outputs, self.carried, sown = cast(params, self.carried, policy.cast_inputs(inputs), rngs, wanted)
        return outputs, sown
