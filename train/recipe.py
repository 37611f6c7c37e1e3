"""What a recipe is: a row of the table, and how its options become a training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

import tpuflow
from tpuflow.errors import ConfigError
from tpuflow.examples.data import ImageData
from train import transforms
from train.logs import Lines, Row
from train.optimizers import SCHEDULES, Rate, Rates, make_optimizer
from train.options import Options
from train.pipeline import Batches, Loader
from train.pretrained import TorchLayers, from_torch
from train.transforms import Transform

Arrays = tuple[np.ndarray, np.ndarray]
AT_ONCE = 4096
"""Images that are transformed together, which bounds the memory of it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the table of recipes.

    `run` trains by the options and returns the result of `tpuflow.train`, or None if there is nothing to report. `about` is what the help
    says first. `without`: options that it has no use for, which the command line then refuses. `spelling`: what stands between the words of
    its options.
    """

    name: str
    summary: str
    about: str | None
    defaults: Any
    run: Callable[[Any], Any]
    without: frozenset[str] = frozenset()
    spelling: str = "-"


@dataclass(frozen=True, slots=True)
class Task:
    """What a training is made of: the model, its data as `tpuflow.train` takes them, and the variables it starts from, if not drawn."""

    model: Any
    train: Any
    test: Any
    steps_per_epoch: int
    samples: int
    test_labels: np.ndarray
    variables: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A classifier's training in one row; functions take the options.

    layers: which PyTorch module becomes which of the model's. transforms: (those of training images, those of test images); they are done
    once and for all, or, where `streamed`, batch by batch ahead of their use, as random ones must be. whole: a last batch that is smaller
    is trained on too. exported: PyTorch weights for `--init torch-seed0`. lines: what is printed on the way. last: what is printed at the
    end, of the last epoch's figures and the labels of the test images; printed if there was an evaluation.
    """

    images: Callable[[Any], ImageData]
    model: Callable[[Any], Any]
    layers: Callable[[Any], TorchLayers]
    transforms: Callable[[Any], tuple[Sequence[Transform], Sequence[Transform]]] = lambda options: ((), ())
    streamed: bool = False
    whole: bool = False
    exported: Any = None
    metrics: Sequence[str] | None = None
    lines: Sequence[Row] = ()
    last: Callable[[Mapping[str, Any], np.ndarray], str] | None = None

    def task(self, options: Options, images: ImageData | None = None) -> Task:
        """The training of the data set, or of the images that are given."""
        train, test = first_samples(self.images(options) if images is None else images, options)
        model, steps = self.model(options), self.transforms(options)
        shape = transformed((test[0][:1], test[1][:1]), steps[1])[0].shape[1:]
        variables = self.variables(options, model, shape)
        if not self.streamed:
            train, test, steps = transformed(train, steps[0]), transformed(test, steps[1]), ((), ())
        shuffle = True if options.shuffle < 0 else options.shuffle
        batches = Batches(*train, options.batch_size, steps[0], shuffle=shuffle, seed=options.seed, drop_remainder=not self.whole)
        source = train if self.whole and not shuffle else Loader(batches)
        tested = Loader(Batches(*test, min(options.batch_size, len(test[0])), steps[1])) if self.streamed else test
        return Task(model, source, tested, len(batches), len(train[0]), test[1], variables)

    def variables(self, options: Options, model: Any, image_shape: Sequence[int]) -> Mapping[str, Any] | None:
        """The Flax variables that training starts from: None for the model's own, drawn from the seed.

        Raises:
          ConfigError: the recipe has no exported weights.
          WeightsError: a file of weights is missing, damaged or does not fit.
        """
        if options.init == "random":
            return None
        if options.init != "torch-seed0":
            return from_torch(model, options.init, self.layers(model), image_shape)
        if self.exported is None:
            raise ConfigError(
                "--init torch-seed0: no weights were exported for this recipe; there are: random, or a file of PyTorch weights."
            )
        return from_torch(model, self.exported, self.layers(model), image_shape)

    def run(self, options: Options, images: ImageData | None = None, *, logs: bool = True) -> Any:
        """Train on the simulated device, with the lines if `logs`; the result, after what is printed at its end."""
        task = self.task(options, images)
        lines = (Lines(self.lines, task.samples),) if logs and self.lines else ()
        started = time.perf_counter()
        result = self._train(task, options, lines)
        print(f"Total execution time = {time.perf_counter() - started:.3f} sec", flush=True)
        if not result.interrupted and self.last is not None and "accuracy" in result.history[-1]:
            print(self.last(result.history[-1], task.test_labels), flush=True)
        return result

    def _train(self, task: Task, options: Options, lines: Sequence[tpuflow.Callback]) -> Any:
        epochs, stop = walk(options, task.steps_per_epoch)
        rate = rate_for(options, task.steps_per_epoch)
        evaluated = options.test_samples != 0
        return tpuflow.train(
            task.model,
            task.train,
            policy=options.policy,
            optimizer=optimizer_for(options, rate),
            loss=tpuflow.cross_entropy(label_smoothing=options.label_smoothing, spread="others"),
            epochs=epochs,
            batch_size=options.batch_size,
            sink_size=options.sink_size,
            eval_data=task.test if evaluated else None,
            eval_epochs=options.eval_epochs,
            eval_steps=options.eval_steps,
            seed=options.seed,
            params=task.variables,
            keep_batchnorm_fp32=options.keep_batchnorm_fp32,
            loss_scale=options.loss_scale,
            accumulate_steps=options.accumulate,
            metrics=self.metrics if evaluated else None,
            callbacks=(*lines, *stop, *watchers(options, rate)),
            resume=options.checkpoint_dir if options.resume else None,
            progress=options.progress,
            numerics=options.numerics,
            **options.device,
        )


def walk(options: Options, steps_per_epoch: int) -> tuple[int, Sequence[tpuflow.Callback]]:
    """(epochs, callbacks that end the training) which make the number of steps that is asked for."""
    if options.steps is None:
        return options.epochs, ()
    return math.ceil(options.steps / epoch_steps(options, steps_per_epoch)), (StopAfter(options.steps),)


def epoch_steps(options: Options, steps_per_epoch: int) -> int:
    """Steps in an epoch: those of a positive sink, else those of a pass over the data."""
    return options.sink_size if options.sink_size > 0 else steps_per_epoch


class StopAfter(tpuflow.Callback):
    """End the training after so many steps; a sink that would go on beyond ends there."""

    def __init__(self, steps: int):
        self.every_steps = steps

    def on_step_end(self, run: tpuflow.Run) -> None:
        """Ask for the end once the steps are done."""
        run.stop = run.stop or run.steps >= (self.every_steps or 0)


def watchers(options: Options, rate: Rate) -> list[tpuflow.Callback]:
    """Callbacks that save checkpoints, stop early and write TensorBoard's files, if that is asked for."""
    found: list[tpuflow.Callback] = []
    if options.checkpoint_dir is not None:
        found.append(tpuflow.ModelCheckpoint(options.checkpoint_dir, every_steps=options.checkpoint_steps, keep=options.keep_checkpoints))
    if options.patience is not None:
        found.append(tpuflow.EarlyStopping(patience=options.patience))
    if options.tensorboard is not None:
        of_step = (lambda step: rate(step // options.accumulate)) if callable(rate) else rate
        found.append(tpuflow.SummaryWriter(options.tensorboard, learning_rate=of_step))
    return found


def rate_for(options: Options, steps_per_epoch: int) -> Rate:
    """The learning rate, or its schedule, which counts updates."""
    per_epoch = epoch_steps(options, steps_per_epoch)
    updates, total = (math.ceil(steps / options.accumulate) for steps in (per_epoch, options.steps or options.epochs * per_epoch))
    return SCHEDULES[options.schedule](Rates(options.lr, options.lr_init, options.lr_end, options.warmup_epochs, updates, total))


def optimizer_for(options: Options, rate: Rate) -> optax.GradientTransformation:
    """The Optax optimizer with weight decay and clipping."""
    return make_optimizer(
        options.optimizer, rate, momentum=options.momentum, weight_decay=options.weight_decay, clip_norm=options.clip_norm
    )


def first_samples(data: ImageData, options: Options) -> tuple[Arrays, Arrays]:
    """(training, test) images and labels, cut to the number that is asked for."""
    (train, train_labels), (test, test_labels) = data.train, data.test
    a, b = options.train_samples, options.test_samples or None
    return (train[:a], train_labels[:a]), (test[:b], test_labels[:b])


def transformed(data: Arrays, steps: Sequence[Transform]) -> Arrays:
    """The data after transforms that draw no random numbers, once and for all."""
    images, labels = data
    rng = np.random.default_rng(0)
    parts = [transforms.apply(steps, images[i : i + AT_ONCE], rng) for i in range(0, len(images), AT_ONCE)]
    return np.concatenate(parts), labels
