"""The first example of MindSpore's training guide: a network of one's own, and one step of training whose losses are all zero.

The guide's labels are all zeros, so every loss is minus zero times a logarithm, and no parameter moves.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import tpuflow
from models.relu_reduce_mean_dense import ReLUReduceMeanDense
from tpuflow.amp import get_policy
from train.losses import dense_softmax_cross_entropy
from train.options import WATCHED, Options
from train.recipe import Recipe, optimizer_for, rate_for

SHAPE = (7, 7, 2048)
"""Height, width and channels of one image."""

DEFAULTS = Options(epochs=1, batch_size=32, lr=0.1, momentum=0.1)


def train_step(model: Any, optimizer: optax.GradientTransformation, state: tuple[Any, Any], batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """One step: ((variables, optimizer state), (images, label shares)) -> (the new pair, losses fp32 [B]). Gradients are of their sum."""
    variables, opt_state = state
    images, labels = batch

    def loss(variables: Any) -> tuple[jax.Array, jax.Array]:
        losses = dense_softmax_cross_entropy(model.apply(variables, images).astype(jnp.float32), labels)
        return losses.sum(), losses

    (_, losses), grads = jax.value_and_grad(loss, has_aux=True)(variables)
    updates, opt_state = optimizer.update(grads, opt_state, variables)
    return (optax.apply_updates(variables, updates), opt_state), losses


def run(options: Options) -> None:
    """Print the guide's line for every step: the batch's losses."""
    model, optimizer, policy = ReLUReduceMeanDense(), optimizer_for(options, rate_for(options, 1)), get_policy(options.policy)
    rng = np.random.default_rng(options.seed)
    images = rng.standard_normal((options.batch_size, *SHAPE)).astype(np.float32)
    labels = np.zeros((options.batch_size, model.classes), np.float32)
    variables = policy.cast_params(model.init(jax.random.key(options.seed), images))
    state = variables, optimizer.init(variables)

    def step(state: Any, batch: Any) -> Any:
        return train_step(model, optimizer, state, policy.cast_inputs(batch))

    on_device = tpuflow.jit(step, policy=policy, **options.device)
    for _ in range(options.steps or options.epochs):
        state, losses = on_device(state, (images, labels))
        print("-------loss------", np.asarray(losses), flush=True)


WITHOUT = WATCHED | {
    "accumulate", "loss_scale", "keep_batchnorm_fp32", "label_smoothing", "init", "shuffle", "sink_size", "data_dir", "train_samples",
    "test_samples",
}  # fmt: skip
RECIPE = Recipe(
    "relu_reduce_mean_dense", "the first network of MindSpore's training guide: one step on random images", __doc__, DEFAULTS, run, WITHOUT
)
