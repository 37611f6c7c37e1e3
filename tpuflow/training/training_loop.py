"""The training loop on the host: epochs, sinks, callbacks, evaluation, interruption."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuflow.data.chunks import Chunk
from tpuflow.data.epochs import EpochIterator
from tpuflow.data.positions import START, Position
from tpuflow.device.interrupts import defer_interrupts
from tpuflow.errors import TpuflowError
from tpuflow.isa.file import code_hash
from tpuflow.jaxprs.processes import by_first, check_alike, count, is_first, local
from tpuflow.numerics.probing import Probe
from tpuflow.stages.flattening import nested
from tpuflow.training.averaging import averaged
from tpuflow.training.callbacks.base import Callback, Run, notify
from tpuflow.training.checkpoints import orbax_files
from tpuflow.training.checkpoints.fingerprints import fingerprint
from tpuflow.training.checkpoints.locking import Claims, not_written
from tpuflow.training.checkpoints.resuming import (
    LoopPosition,
    check_same,
    check_step,
    loop_position_of,
    new_epoch,
    progress_of,
    restore_callbacks,
    restored_state,
    restoring,
)
from tpuflow.training.device_sink import DeviceSink, compile_ahead
from tpuflow.training.inference import Trained
from tpuflow.training.metrics import Tally
from tpuflow.training.preparing import Job
from tpuflow.training.progress import Bar, progress_bar
from tpuflow.training.result import TrainResult
from tpuflow.training.strategies import ONE_CHIP
from tpuflow.training.train_step import Recipe, StepFigures, TrainState


class Training:
    """One training from its first step to its result."""

    def __init__(self, job: Job, callbacks: Sequence[Callback]):
        self._probe = Probe(job, lambda: self._whole_state) if job.config.numerics else None
        self._job, self._callbacks = job, (*callbacks, *([self._probe] if self._probe else []))
        recipe = job.recipe
        self._train_sink = DeviceSink("train_step", recipe.train_step, job.target, job.feed.structure, at_host=recipe.at_host)
        eval_structure = (job.eval_feed or job.feed).structure
        self._eval_sink = DeviceSink("eval_step", job.recipe.eval_step, job.target, eval_structure, updates=False)
        self._state = job.recipe.strategy.shard_state(job.state)
        self._iterator = self._iterate_from(START)
        self._loop_position = LoopPosition(START, job.config.sink_size)
        self._first_epoch, self._continues = 0, False
        self._bar = Bar(None)
        self._interrupted = False
        self._compile_seconds = 0.0
        self._run = Run(
            job.config.epochs, _steps_per_epoch(job), job.batch_size, job.settings["policy"], evaluates=job.eval_feed is not None
        )
        self._claims = Claims()
        self._run.claim, self._run.save, self._run.learning_rate = self._claim, self._save, self._learning_rate
        self._run.eval_params = self._eval_params

    def restore(self, checkpoint: Any) -> None:
        """Continue from a `tpuflow.training.checkpoints.files.Checkpoint`.

        Raises:
          CheckpointError: it was saved by another training.
        """
        job, run, progress = self._job, self._run, checkpoint.progress
        check_same(checkpoint.path, progress, self._fingerprint)
        self._state = job.recipe.strategy.shard_state(restored_state(checkpoint.path, checkpoint.arrays, job.state))
        check_step(checkpoint.path, progress, self._step_code)
        loop = loop_position_of(progress)
        with restoring(checkpoint.path, "the position of the data"):
            self._iterator = self._iterate_from(loop.position)
        run.history, run.step = progress["history"], progress["steps"] - 1
        run.round_trips, run.eval_round_trips = progress["round_trips"], progress["eval_round_trips"]
        run.resumed_at, run.resumed_from = run.steps, checkpoint.path
        self._first_epoch = loop.first_epoch(job.config.sink_size)
        self._continues = loop.same_epochs(job.config.sink_size) and not loop.closed
        self._loop_position = replace(loop, sink_size=job.config.sink_size, steps_done=self._continues and loop.steps_done)
        restore_callbacks(checkpoint.path, progress["callbacks"], self._callbacks)

    def _iterate_from(self, position: Position) -> EpochIterator:
        job = self._job
        return EpochIterator(
            job.feed, position, steps=job.config.epochs * job.config.sink_size - position.steps if job.config.sink_size > 0 else None
        )

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint(self._job)

    @cached_property
    def _step_code(self) -> str:
        """The hash of the compiled step for the first batch's shape."""
        return code_hash(self._train_sink.prepare(self._state, self._job.signature).executable.program)

    def run(self, *, progress: bool) -> TrainResult:
        """Train; after Ctrl-C, what was trained until then.

        Raises:
          TpuflowError: bad data came up on the way; `error.result` holds what was trained until then, unless there are several processes:
            whole arrays are made by all of them together, and the others do not know.
          PeerError: another process is gone.
        """
        self._check_alike()
        with self._claims:
            return self._trained(progress=progress)

    def _check_alike(self) -> None:
        """Check that all processes begin at the same step: from the same checkpoint, or from none."""
        advice = "Let resume name a directory that all of them see."
        check_alike("the step to go on from", self._run.steps.to_bytes(8, "little"), advice)

    def _trained(self, *, progress: bool) -> TrainResult:
        began = time.perf_counter()
        try:
            with progress_bar(shown=progress and is_first()) as self._bar:
                self._bar.begin("compiling", None)
                self._compile_seconds = self._compile_ahead()
                self._notify("on_train_begin")
                self._epochs()
        except KeyboardInterrupt:
            if count() > 1:
                raise
            self._interrupted = True
            self._count_unreported()
        except TpuflowError as error:
            if count() > 1:
                raise
            error.result = self._result(began)  # type: ignore[attr-defined]
            raise
        finally:
            self._iterator.close()
        if isinstance(self._job.recipe, Recipe):
            whole = self._whole_state
            self._job.recipe.model.update(whole.params, whole.carried)
        self._notify("on_train_end")
        self._run.finished = True
        self._notify("on_checkpoint")
        return self._result(began)

    def _notify(self, event: str) -> None:
        notify(self._callbacks, event, self._run)

    def _compile_ahead(self) -> float:
        """Compile the Programs that are sure to be needed, so that compilation errors show before the first step."""
        job = self._job
        work: list[Any] = [
            (
                self._train_sink,
                self._state,
                job.feed.layouts(job.config.epochs * job.config.sink_size if job.config.sink_size > 0 else None),
            )
        ]
        if job.eval_feed is not None:
            work.append((self._eval_sink, self._eval_state, job.eval_feed.layouts(None)))
        return compile_ahead(work)

    @property
    def _eval_state(self) -> TrainState:
        """What evaluation needs of the state."""
        return self._job.recipe.eval_state(self._state)

    @property
    def _whole_state(self) -> TrainState:
        """The state as one chip would hold it: sharded arrays gathered."""
        return self._job.recipe.strategy.gather_state(local(self._state))

    def _epochs(self) -> None:
        for number in range(self._first_epoch, self._job.config.epochs):
            if self._run.stop:
                return
            self._begin_epoch(number)
            self._steps()
            self._evaluate(due=_divides(self._job.eval_epochs, number + 1))
            self._run.history[-1]["complete"] = self._loop_position.closed = self._loop_position.steps_done
            self._notify("on_epoch_end")
            self._notify("on_checkpoint")

    def _begin_epoch(self, number: int) -> None:
        """A new epoch, or what is left of one."""
        run, continues = self._run, self._continues and self._run.history
        self._continues = False
        if continues:
            run.step_in_epoch = run.history[-1]["steps"]
            run.metrics = {name: value for name, value in (run.history[-1]["evaluations"] or [{}])[-1].items() if name != "step"}
        else:
            run.history.append(new_epoch(number))
            run.metrics = {}
            run.step_in_epoch = (
                run.steps % self._job.config.sink_size if self._job.config.sink_size > 0 else self._iterator.position.batches
            )
            self._loop_position.steps_done = False
        self._loop_position.epoch, self._loop_position.closed, run.epoch = number, False, number
        self._notify("on_epoch_begin")
        self._bar.begin(f"epoch {number + 1}/{self._job.config.epochs}", run.steps_per_epoch)
        self._bar.advance(run.step_in_epoch)

    def _steps(self) -> None:
        """Run the round trips of one epoch, with the evaluations and checkpoints between them."""
        run, loop = self._run, self._loop_position
        loop.steps_done = loop.steps_done or self._no_step_left()
        while not loop.steps_done and not run.stop:
            self._sink(self._iterator.chunks(self._round_trip_steps(), within_epoch=self._job.config.sink_size <= 0))
            loop.steps_done = self._no_step_left()
            self._evaluate(due=_divides(self._job.config.eval_steps, run.steps))
            if not loop.steps_done and not run.stop:
                self._notify("on_checkpoint")

    def _no_step_left(self) -> bool:
        """Whether this epoch has no step left; at the end of a pass, the iterator goes on to the next one."""
        if self._job.config.sink_size > 0:
            return self._run.step_in_epoch >= self._job.config.sink_size
        return self._iterator.finish_epoch_if_over()

    def _round_trip_steps(self) -> int | None:
        """Steps of the next round trip: up to the sink's end, or until an evaluation or a callback is due; None for all that are left."""
        size, steps = self._job.config.sink_size, self._run.steps
        ends = [size - self._run.step_in_epoch] if size > 0 else [1] if size == 0 else []
        periods = [self._job.config.eval_steps, *(callback.every_steps for callback in self._callbacks)]
        return min([*ends, *(every - steps % every for every in periods if every)], default=None)

    def _sink(self, pieces: Iterable[Chunk]) -> None:
        """Run one round trip, and report its steps to the callbacks, also if Ctrl-C has interrupted it."""
        first = len(self._run.history[-1]["losses"])
        self._notify("on_sink_begin")
        began = time.perf_counter()
        try:
            self._state = self._train_sink.run(self._state, pieces, self._record)
        finally:
            self._run.sink_seconds = time.perf_counter() - began
            self._run.round_trips += 1
            self._report_steps(first)
        self._notify("on_sink_end")

    def _record(self, state: TrainState, figures: StepFigures, steps: int) -> None:
        """Keep the state and the figures of a slice, and where the data stand."""
        epoch = self._run.history[-1]
        losses = np.asarray(figures.loss, np.float64).tolist()
        scales = np.asarray(figures.loss_scale, np.float64).tolist()
        skipped = np.asarray(figures.skipped).astype(bool).tolist()
        measured = {name: np.asarray(values, np.float64).tolist() for name, values in figures.metrics.items()}
        with defer_interrupts():
            self._state = state
            self._iterator.mark_done(steps)
            epoch["losses"] += losses
            epoch["loss_scale"] += scales
            epoch["skipped"] += skipped
            for name, values in measured.items():
                epoch["metrics"].setdefault(name, []).extend(values)
            epoch["steps"] = len(epoch["losses"])
            self._bar.advance(steps, losses[-1])

    def _report_steps(self, first: int) -> None:
        run, epoch = self._run, self._run.history[-1]
        run.losses = epoch["losses"][first:]
        for i in range(first, len(epoch["losses"])):
            run.step, run.step_in_epoch = run.step + 1, run.step_in_epoch + 1
            self._notify("on_step_begin")
            run.loss, run.loss_scale, run.skipped = epoch["losses"][i], epoch["loss_scale"][i], epoch["skipped"][i]
            run.step_metrics = {name: values[i] for name, values in epoch["metrics"].items()}
            self._notify("on_step_end")

    def _count_unreported(self) -> None:
        """Count the steps that Ctrl-C kept from being reported: the step numbers must be those of the state that is saved."""
        run, unreported = self._run, self._iterator.position.steps - self._run.steps
        run.step, run.step_in_epoch = run.step + unreported, run.step_in_epoch + unreported

    def _evaluate(self, *, due: bool) -> None:
        """The metrics on the evaluation data, one round trip; not twice after the same step."""
        feed, done = self._job.eval_feed, self._run.history[-1]["evaluations"]
        if not due or feed is None or (done and done[-1]["step"] == self._run.steps):
            return
        self._notify("on_eval_begin")
        self._bar.begin(f"evaluation {self._run.epoch + 1}/{self._job.config.epochs}", feed.batches)
        tally, iterator = Tally(self._job.recipe.metrics), EpochIterator(feed)

        def record(state: TrainState, figures: Mapping[str, Any], steps: int) -> None:
            tally.add(figures)
            iterator.mark_done(steps)
            self._bar.advance(steps)

        self._eval_sink.run(self._eval_state, iterator.chunks(None), record)
        self._run.eval_round_trips += 1
        self._run.metrics = tally.results()
        self._run.history[-1].update(self._run.metrics)
        done.append({"step": self._run.steps, **self._run.metrics})
        self._notify("on_eval_end")

    def _save(self, directory: Any) -> Path:
        """Write a checkpoint of the training as it stands, in a directory that no other training writes in."""
        self._claim(directory)
        self._loop_position.position = self._iterator.position
        files, steps, arrays = orbax_files(), self._run.steps, nested(self._whole_state._asdict())
        progress = progress_of(self._run, self._loop_position, self._callbacks, self._fingerprint, self._step_code)
        by_first(lambda: files.save(directory, steps, arrays, progress), not_written(directory))
        return files.folder(directory, steps)

    def _claim(self, directory: Any) -> None:
        """Be the one training that writes checkpoints in a directory; of several processes, the first one does for all."""
        by_first(lambda: self._claims.claim(directory), not_written(directory))

    def _eval_params(self) -> Any:
        recipe = self._job.recipe
        state = self._whole_state
        return _arrays(recipe.eval_variables(recipe.eval_state(state))[0] if isinstance(recipe, Recipe) else state.params)

    def _learning_rate(self) -> float | None:
        found = optax.tree.get_all_with_path(self._state.opt_state, "learning_rate")
        return float(found[0][1]) if found else None

    def _result(self, began: float) -> TrainResult:
        job, state = self._job, self._whole_state
        executables = (*self._train_sink.executables.values(), *self._eval_sink.executables.values())
        compiling = self._compile_seconds + self._train_sink.compile_seconds + self._eval_sink.compile_seconds
        return TrainResult(
            trained=Trained(replace(job.recipe, strategy=ONE_CHIP), job.recipe.eval_state(state), job.target, job.batch_size),
            ema=None if state.ema is None else _arrays(averaged(state.ema.params, state.params)),
            params=_arrays(state.params),
            carried=_arrays(state.carried),
            opt_state=_arrays(state.opt_state),
            history=self._run.history,
            settings=job.settings,
            chosen=job.chosen,
            round_trips=self._run.round_trips,
            eval_round_trips=self._run.eval_round_trips,
            launches=self._train_sink.launches + self._eval_sink.launches,
            hbm_bytes=max((_hbm_bytes(e.program) for e in executables), default=0),
            seconds={"total": time.perf_counter() - began, "compile": compiling, "train": self._train_sink.launch_seconds},
            interrupted=self._interrupted,
            resumed_at=self._run.resumed_at,
            executables=executables,
            numerics=tuple(self._probe.reports) if self._probe else (),
        )


def _divides(period: int | None, count: int) -> bool:
    return period is not None and count % period == 0


def _steps_per_epoch(job: Job) -> int | None:
    return job.config.sink_size if job.config.sink_size > 0 else job.feed.batches


def _arrays(tree: Any) -> Any:
    """Every array as a JAX array."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


def _hbm_bytes(program: Any) -> int:
    return program.hbm_bytes
