"""The training loop on the host: epochs, sinks, callbacks, evaluation, interruption."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.api.callbacks import Callback, Run, notify
from tpuflow.api.feeding import Chunk, Walk
from tpuflow.api.interrupts import Interrupts
from tpuflow.api.metrics import Tally
from tpuflow.api.preparing import Job
from tpuflow.api.progress import Bar, progress_bar
from tpuflow.api.result import TrainResult
from tpuflow.api.sinking import DeviceSink, compile_ahead
from tpuflow.api.stepping import StepFigures, TrainState
from tpuflow.errors import TpuflowError


class Training:
    """One training from its first step to its result."""

    def __init__(self, job: Job, callbacks: Sequence[Callback]):
        self._job, self._callbacks = job, callbacks
        self._train_sink = DeviceSink("train_step", job.recipe.train_step, job.target)
        self._eval_sink = DeviceSink("eval_step", job.recipe.eval_step, job.target, updates=False)
        self._state = job.state
        self._walk = Walk(job.feed, steps=job.epochs * job.sink_size if job.sink_size > 0 else None)
        self._interrupts = Interrupts()
        self._bar = Bar(None)
        self._eval_round_trips = 0
        self._interrupted = False
        self._compile_seconds = 0.0
        self._run = Run(job.epochs, _steps_per_epoch(job), job.batch_size, job.recipe.policy.name)

    def run(self, *, progress: bool) -> TrainResult:
        """Train; after Ctrl-C, what was trained until then.

        Raises:
          TpuflowError: bad data came up on the way; `error.result` holds what was trained until then.
        """
        began = time.perf_counter()
        try:
            with progress_bar(shown=progress) as self._bar, self._interrupts:
                self._bar.begin("compiling", None)
                self._compile_seconds = self._compile_ahead()
                notify(self._callbacks, "on_train_begin", self._run)
                self._epochs()
        except KeyboardInterrupt:
            self._interrupted = True
        except TpuflowError as error:
            error.result = self._result(began)  # type: ignore[attr-defined]
            raise
        finally:
            self._walk.close()
        notify(self._callbacks, "on_train_end", self._run)
        return self._result(began)

    def _compile_ahead(self) -> float:
        """Put on the chip what is sure to be needed, so that what cannot be shows before the first step."""
        job = self._job
        work: list[Any] = [(self._train_sink, self._state, job.feed.layouts(job.epochs * job.sink_size if job.sink_size > 0 else None))]
        if job.eval_feed is not None:
            work.append((self._eval_sink, self._eval_state, job.eval_feed.layouts(None)))
        return compile_ahead(work)

    @property
    def _eval_state(self) -> TrainState:
        """What evaluation needs of the state."""
        return self._state._replace(opt_state=(), key=None)

    def _epochs(self) -> None:
        for number in range(self._job.epochs):
            self._run.epoch, self._run.metrics = number, {}
            self._run.history.append(_new_epoch(number))
            notify(self._callbacks, "on_epoch_begin", self._run)
            self._bar.begin(f"epoch {number + 1}/{self._job.epochs}", self._run.steps_per_epoch)
            for pieces in self._sinks():
                self._sink(pieces)
                if self._run.stop:
                    break
            self._evaluate()
            self._run.history[-1]["complete"] = not self._run.stop
            notify(self._callbacks, "on_epoch_end", self._run)
            if self._run.stop:
                return

    def _sinks(self) -> Iterator[Iterable[Chunk]]:
        """The round trips of one epoch, each as the pieces of data it walks over."""
        size = self._job.sink_size
        if size != 0:
            yield self._walk.pieces(None if size < 0 else size)
            return
        for piece in self._walk.pieces(None):
            for i in range(piece.count):
                yield (piece.part(i, 1),)

    def _sink(self, pieces: Iterable[Chunk]) -> None:
        """One round trip; then its steps are told to the callbacks, also if Ctrl-C cut it short."""
        first = len(self._run.history[-1]["losses"])
        try:
            self._state = self._train_sink.run(self._state, pieces, self._interrupts, self._record)
        finally:
            self._run.round_trips += 1
            self._tell_steps(first)
        notify(self._callbacks, "on_sink_end", self._run)

    def _record(self, state: TrainState, figures: StepFigures, steps: int) -> None:
        """Keep the state and the figures of a slice."""
        self._state = state
        self._walk.done(steps)
        epoch = self._run.history[-1]
        losses = np.asarray(figures.loss, np.float64).tolist()
        epoch["losses"] += losses
        epoch["loss_scale"] += np.asarray(figures.loss_scale, np.float64).tolist()
        epoch["skipped"] += np.asarray(figures.skipped).astype(bool).tolist()
        epoch["steps"] = len(epoch["losses"])
        self._bar.advance(steps, losses[-1])

    def _tell_steps(self, first: int) -> None:
        run, epoch = self._run, self._run.history[-1]
        run.losses = epoch["losses"][first:]
        for i in range(first, len(epoch["losses"])):
            run.step += 1
            run.loss, run.loss_scale, run.skipped = epoch["losses"][i], epoch["loss_scale"][i], epoch["skipped"][i]
            notify(self._callbacks, "on_step_end", run)

    def _evaluate(self) -> None:
        """The metrics on the evaluation data, one round trip."""
        feed = self._job.eval_feed
        if feed is None:
            return
        self._bar.begin(f"evaluation {self._run.epoch + 1}/{self._job.epochs}", feed.batches)
        tally, walk = Tally(self._job.recipe.metrics), Walk(feed)

        def record(state: TrainState, figures: Mapping[str, Any], steps: int) -> None:
            tally.add(figures)
            walk.done(steps)
            self._bar.advance(steps)

        self._eval_sink.run(self._eval_state, walk.pieces(None), self._interrupts, record)
        self._eval_round_trips += 1
        self._run.metrics = tally.results()
        self._run.history[-1].update(self._run.metrics)

    def _result(self, began: float) -> TrainResult:
        job, state = self._job, self._state
        executables = (*self._train_sink.executables.values(), *self._eval_sink.executables.values())
        compiling = self._compile_seconds + self._train_sink.compile_seconds + self._eval_sink.compile_seconds
        return TrainResult(
            params=_arrays(state.params),
            carried=_arrays(state.carried),
            opt_state=_arrays(state.opt_state),
            history=self._run.history,
            settings=job.settings,
            chosen=job.chosen,
            round_trips=self._run.round_trips,
            eval_round_trips=self._eval_round_trips,
            launches=self._train_sink.launches + self._eval_sink.launches,
            hbm_bytes=max((_hbm_bytes(e.program) for e in executables), default=0),
            seconds={"total": time.perf_counter() - began, "compile": compiling, "train": self._train_sink.launch_seconds},
            interrupted=self._interrupted,
            executables=executables,
        )


def _new_epoch(number: int) -> dict[str, Any]:
    return {"epoch": number + 1, "losses": [], "loss_scale": [], "skipped": [], "steps": 0, "complete": False}


def _steps_per_epoch(job: Job) -> int | None:
    return job.sink_size if job.sink_size > 0 else job.feed.batches


def _arrays(tree: Any) -> Any:
    """Every array as a JAX array."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


def _hbm_bytes(program: Any) -> int:
    return max((b.address + b.bytes for b in program.buffers), default=0)
