"""LeNet-5 by a training loop of one's own, as MindSpore's training guide writes one: a step function, and a walk over sinks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import tpuflow
from models.lenet import LeNet5
from tpuflow import amp
from tpuflow.errors import ConfigError
from train import lenet
from train.logs import STARTING
from train.options import WATCHED, Options
from train.recipe import Arrays, Recipe, optimizer_for, rate_for, walk

DEFAULTS = replace(lenet.DEFAULTS, sink_size=100)

State = tuple[Any, Any]
"""(variables, optimizer state)"""


def make_step(model: LeNet5, optimizer: optax.GradientTransformationExtraArgs, policy: amp.Policy) -> Callable[[State, Any], Any]:
    """The guide's TrainOneStepCell: (state, (images, labels)) -> (new state, loss)."""
    forward = amp.autocast(model.apply, policy)

    def step(state: State, batch: tuple[Any, Any]) -> tuple[State, jax.Array]:
        variables, opt_state = state
        images, labels = batch

        def scaled_loss(variables: Any) -> tuple[jax.Array, jax.Array]:
            logits: Any = forward(variables, policy.cast_inputs(images))
            loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean().astype(policy.loss_dtype)
            return amp.scale_loss(loss, opt_state), loss

        (_, loss), grads = jax.value_and_grad(scaled_loss, has_aux=True)(variables)
        updates, opt_state = optimizer.update(grads, opt_state, variables)
        return (optax.apply_updates(variables, updates), opt_state), loss.astype(jnp.float32)

    return step


def accuracy(model: LeNet5, variables: Any, test: Arrays, policy: amp.Policy, options: Options) -> float:
    """The share of test images whose class is found, counted on the device by another loop of the same kind."""
    forward = amp.autocast(model.apply, policy)

    def count(variables: Any, batch: tuple[Any, Any]) -> tuple[Any, jax.Array]:
        logits: Any = forward(variables, policy.cast_inputs(batch[0]))
        return variables, jnp.sum(jnp.argmax(logits, axis=-1) == batch[1])

    (walked,) = tpuflow.sink(count, test, state=variables, epochs=1, batch_size=options.batch_size, **options.device)
    return float(np.sum(walked.metrics)) / len(test[1])


def run(options: Options) -> None:
    """Print the guide's line after every sink: its last loss; at the end, the accuracy."""
    policy = amp.get_policy(options.policy).adjusted(options.keep_batchnorm_fp32, options.loss_scale)
    task = lenet.TRAINING.task(options)
    rate = rate_for(options, task.steps_per_epoch)
    optimizer = amp.accumulate(amp.with_loss_scale(optimizer_for(options, rate), policy.loss_scale), options.accumulate)
    model, given = task.model, task.variables
    variables = policy.cast_params(model.init(jax.random.key(options.seed), task.test[0][:1]) if given is None else given)
    epochs, size = walk(options, task.steps_per_epoch)[0], options.sink_size
    if options.steps is not None and options.steps % max(1, size):
        raise ConfigError(f"--steps {options.steps} is not a multiple of --sink-size {size}; this loop ends where a sink ends.")
    print(STARTING, flush=True)
    loop = tpuflow.sink(
        make_step(model, optimizer, policy), task.train, size, state=(variables, optimizer.init(variables)), epochs=epochs,
        **options.device,
    )  # fmt: skip
    for sunk in loop:
        print(f"epoch: {sunk.epoch + 1}/{epochs}, losses: {float(sunk.metrics[-1])}", flush=True)
        if options.steps is not None and sunk.step >= options.steps:
            break
    if options.test_samples != 0:
        print(f"Accuracy: {{'acc': {accuracy(model, loop.state[0], task.test, policy, options)}}}", flush=True)


RECIPE = Recipe(
    "lenet_custom_loop",
    "LeNet-5 by a training loop of one's own: ten sinks of 100 steps",
    __doc__,
    DEFAULTS,
    run,
    WATCHED | {"label_smoothing"},
)
