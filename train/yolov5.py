"""Train YOLOv5 on boxes, with the options of YOLOv5's train.py: from new weights, or from those of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tpuflow
from models.yolov5 import YOLOv5, yolov5
from models.yolov5_config import SIZES, Row
from tpuflow.errors import ConfigError
from tpuflow.importers import load_state_dict
from train.detection import drawing, figures, folders, run_files
from train.detection.batches import TrainingBatches
from train.detection.dataset import DetectionSet, one_class, read_set
from train.detection.description import find_description
from train.detection.evaluation import evaluate
from train.detection.evaluation_batches import EvaluationBatches, stride_for
from train.detection.hyperparameters import Hyperparameters, read_hyperparameters, read_yaml
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.nms import VALIDATION
from train.detection.optimizer import OPTIMIZERS, make_optimizer
from train.detection.options import STRIDE, RunOptions, check_size
from train.detection.predicting import Predictor
from train.detection.results import draw_results
from train.detection.schedules import Plan
from train.detection.transfer import initial_variables, transfer
from train.detection.validating import FITNESS, Frames
from train.detection.weights import config_of, load_network
from train.options import option
from train.pipeline import Loader
from train.ranges import check_least, dashed
from train.recipe import Recipe
from train.yolov5_val import draw_batch

DRAWN_BATCHES = 3
EMA = tpuflow.EMA(0.9999, warmup=2000, statistics=True)
NEW_SIZE = "yolov5s"
WITHOUT_PARAMETERS = ("Concat", "nn.Upsample")
GIVEN_ANEW = ("resume", "json", "numerics", "plot", "progress")
"""Options that a resumed training takes from the command line and not from its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yolov5Options(RunOptions):
    """The options of YOLOv5's train.py that mean something here, and those of the device."""

    weights: Path | None = option(
        None, "model and data", "weights to start from: .pt as YOLOv5 saves it, .safetensors", Path, metavar="FILE"
    )
    cfg: str | None = option(
        None,
        "model and data",
        f"a size, {', '.join(SIZES)}, or a model.yaml; else what --weights is of, or {NEW_SIZE}",
        metavar="NAME|FILE",
    )
    data: str = option("coco128", "model and data", "a data.yaml, or the name of a shipped one", metavar="FILE|NAME")
    data_dir: Path | None = option(
        None, "model and data", "the data set's folder or its parent; else $TPUFLOW_DATA, the user's cache", Path, metavar="FOLDER"
    )
    hyp: Path | None = option(None, "model and data", "hyperparameters by name; else those of hyp.scratch-low", Path, metavar="FILE")
    single_cls: bool = option(False, "model and data", "all classes are one", flag="--single-cls")
    cache: bool = option(False, "model and data", "keep decoded pictures in memory", flag="--cache")
    workers: int = option(2, "model and data", "threads that make batches", int)
    epochs: int = option(100, "training", "passes over the data", int)
    batch_size: int = option(16, "training", "pictures a step; an update takes about 64, by accumulation", int)
    optimizer: str = option("SGD", "training", "how parameters are updated", choices=tuple(OPTIMIZERS))
    cos_lr: bool = option(False, "training", "the rate falls along a cosine, not along a line", flag="--cos-lr")
    label_smoothing: float = option(0.0, "training", "share of a class label that is spread", float)
    freeze: tuple[int, ...] = option((0,), "training", "layers that stay: 10 is the backbone, 0 1 2 the first three", int, nargs="+")
    patience: int = option(100, "training", "stop after so many epochs without a better one", int)
    noautoanchor: bool = option(
        False, "training", "taken for the sake of YOLOv5's commands: anchors are never fitted to the data here", flag="--noautoanchor"
    )
    seed: int = option(0, "training", "of new weights, of the data's order and changes", int)
    noval: bool = option(False, "output", "evaluate after the last epoch only", flag="--noval")
    nosave: bool = option(False, "output", "save after the last epoch only", flag="--nosave")
    save_period: int = option(-1, "output", "keep the weights of every N-th epoch; none if below 1", int, metavar="N")
    resume: str | None = option(
        None, "output", "go on in the folder of a run, or in the newest of --project", nargs="?", const="", metavar="FOLDER"
    )
    project: Path = option(Path("runs/train"), "output", "folder of runs", Path, metavar="FOLDER")
    sink_size: int = option(-1, "device", "steps a host round trip: -1 a whole epoch, 0 each step by itself", int)
    json: Path | None = option(None, "output", "write the whole result there", Path, metavar="FILE")
    numerics: int | None = option(
        None, "output", "report what happens to every number of a step: before the first, and after every N-th", int, metavar="N"
    )
    plot: Path | None = option(None, "output", "draw the loss there: .png, .svg or .pdf", Path, metavar="FILE")
    progress: bool = option(True, "output", "no progress bar", flag="--no-progress")

    def check(self) -> None:
        """That numbers are in their ranges.

        Raises:
          ConfigError: one is not.
        """
        self.check_device()
        check_size(self.imgsz, STRIDE, least=2 * STRIDE)
        least = {"epochs": 1, "batch_size": 1, "workers": 1, "patience": 0, "seed": 0, "sink_size": -1, "numerics": 1}
        check_least(self, least, dashed)
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"--label-smoothing: expected 0 to below 1, got {self.label_smoothing}.")


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained on what."""

    network: YOLOv5
    variables: Mapping[str, Any]
    hyp: Hyperparameters
    train: DetectionSet
    val: DetectionSet
    frozen: tuple[str, ...]


def run(options: Yolov5Options) -> Any:
    """Train, write everything into the run's folder, measure the best weights; what `tpuflow.train` returned."""
    options, folder = resumed(options) if options.resume is not None else (options, None)
    options.check()
    job = prepare(options)
    if folder is None:
        folder = folders.run_folder(options.project, options.name, exist_ok=options.exist_ok)
        run_files.write_settings(folder, options, job.hyp)
    result = train(options, job, folder)
    if not result.interrupted:
        draw_results(folder / run_files.RESULTS)
        _measure(options, job, folder)
    print(f"Results are in {folder}", flush=True)
    return result


def prepare(options: Yolov5Options) -> Job:
    """Read data, hyperparameters and weights, and say what was found."""
    hyp = read_hyperparameters(options.hyp)
    description = find_description(options.data, options.data_dir)
    train, val = (read_set(description, split) for split in ("train", "val"))
    if options.single_cls:
        train, val = one_class(train), one_class(val)
    print(f"{train.summary()}\n{val.summary()}", flush=True)
    network, state = network_of(options, len(train.names))
    stride_for(network.config, options.imgsz)
    variables = initial_variables(network, options.seed)
    if options.weights is not None and state is not None:
        made = transfer(options.weights, state, network, variables)
        print(f"taken from {options.weights}: {made}", flush=True)
        variables = made.variables
    return Job(network, variables, hyp, train, val, frozen(options.freeze, network.config.architecture.rows))


def train(options: Yolov5Options, job: Job, folder: Path) -> Any:
    """Train as the release does; what `tpuflow.train` returned."""
    batches = TrainingBatches(job.train, options.imgsz, options.batch_size, job.hyp, options.seed, keep=options.cache)
    plan = Plan(job.hyp, options.epochs, len(batches), options.batch_size, options.cos_lr)
    if options.resume is None:
        _draw(batches, job.train, folder)
    frames = Frames(EvaluationBatches(job.val, options.imgsz, options.batch_size, rectangular=False))
    config, checkpoints = job.network.config, folder / run_files.CHECKPOINTS
    saver = tpuflow.ModelCheckpoint(
        checkpoints, every_epochs=options.epochs if options.nosave else 1, keep=1, best=None if options.nosave else FITNESS
    )
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), job.variables)
    return tpuflow.train(
        job.network,
        Loader(batches, threads=options.workers),
        policy=options.policy,
        optimizer=make_optimizer(options.optimizer, plan),
        loss_fn=detection_loss(DetectionLoss(config, job.hyp, options.imgsz, options.label_smoothing)),
        inputs=pixels,
        params=job.variables,
        frozen=job.frozen,
        ema=EMA,
        accumulate_steps=plan.accumulation,
        epochs=options.epochs if options.sink_size < 1 else -(-options.epochs * len(batches) // options.sink_size),
        sink_size=options.sink_size,
        eval_data=Loader(frames, threads=options.workers),
        eval_epochs=options.epochs if options.noval else 1,
        metrics=(frames.metric(config),),
        callbacks=(
            run_files.EpochLines(folder, plan),
            *([tpuflow.EarlyStopping(FITNESS, patience=options.patience)] if options.patience else []),
            saver,
            run_files.WeightFiles(folder, saver, config, like, options.save_period),
        ),
        resume=checkpoints if options.resume is not None else None,
        seed=options.seed,
        numerics=options.numerics or False,
        progress=options.progress,
        **options.device,
    )


def _measure(options: Yolov5Options, job: Job, folder: Path) -> None:
    """The table, the curves and some pictures of the best weights, or of the last ones where none were told to be the best."""
    best = next(path for name in ("best", "last") if (path := folder / run_files.WEIGHTS / f"{name}{run_files.KIND}").exists())
    trained = load_network(best, job.val.names)
    predictor = Predictor(trained.network, trained.variables, VALIDATION, options.policy, options)
    batches = EvaluationBatches(job.val, options.imgsz, options.batch_size, rectangular=False)
    found = evaluate(predictor, batches, threads=options.workers, watch=partial(draw_batch, folder, job.val))
    print(f"{best}:\n{found.table()}", flush=True)
    figures.draw_evaluation(found, folder)


def frozen(layers: Sequence[int], rows: Sequence[Row]) -> tuple[str, ...]:
    """Patterns of the parameters of layers: one number stands for so many of the first of a network's rows, several for themselves.

    Raises:
      ConfigError: there are not so many.
    """
    if not all(0 <= layer <= len(rows) for layer in layers):
        raise ConfigError(f"--freeze: expected numbers from 0 to {len(rows)}, got {' '.join(map(str, layers))}.")
    chosen = layers if len(layers) > 1 else range(layers[0])
    return tuple(f"model_{layer}/*" for layer in chosen if rows[layer].kind not in WITHOUT_PARAMETERS)


def network_of(options: Yolov5Options, classes: int) -> tuple[YOLOv5, Mapping[str, np.ndarray] | None]:
    """(the network that is asked for, with so many classes; the tensors of --weights)."""
    state = None if options.weights is None else load_state_dict(options.weights)
    if options.cfg is None and options.weights is not None and state is not None:
        return YOLOv5(dataclasses.replace(config_of(options.weights, state), classes=classes)), state
    name = options.cfg or NEW_SIZE
    is_file = (Path(name).suffix in (".yaml", ".yml") and Path(name).stem not in SIZES) or Path(name).is_file()
    try:
        return yolov5(read_yaml(Path(name), "--cfg") if is_file else Path(name).stem, classes), state
    except ValueError as error:
        raise ConfigError(f"--cfg {name}: {error}.") from error


def resumed(options: Yolov5Options) -> tuple[Yolov5Options, Path]:
    """(the options of the run to go on with, its folder).

    Raises:
      ConfigError: there is no such run.
    """
    runs = sorted(options.project.glob(f"*/{run_files.OPTIONS}"), key=lambda path: path.stat().st_mtime)
    if not options.resume and not runs:
        raise ConfigError(f"--resume: no run in {options.project}; give the folder of one, or --project.")
    folder = Path(options.resume) if options.resume else runs[-1].parent
    if not (folder / run_files.OPTIONS).is_file():
        raise ConfigError(
            f"--resume {folder}: no run is there, which would have {run_files.OPTIONS}; give the folder of one{_such_as(runs)}."
        )
    given = read_yaml(folder / run_files.OPTIONS, "--resume")
    kinds = {one.name: one for one in dataclasses.fields(Yolov5Options)}
    if unknown := [str(name) for name in given if name not in kinds]:
        raise ConfigError(f"--resume {folder}: {run_files.OPTIONS} has {', '.join(unknown)}, which are no options.")
    values = {name: _read(kinds[name], value) for name, value in given.items() if name not in GIVEN_ANEW}
    values |= {name: getattr(options, name) for name in GIVEN_ANEW} | {"hyp": folder / run_files.HYPERPARAMETERS}
    return Yolov5Options(**values), folder


def _such_as(runs: Sequence[Path]) -> str:
    return f", such as {runs[-1].parent}" if runs else ""


def _read(one: Any, value: Any) -> Any:
    """The value of an option as it was before it was written."""
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if one.metadata["type"] is Path and value is not None else value


def _draw(batches: TrainingBatches, data: DetectionSet, folder: Path) -> None:
    """train_batch0.jpg and two more: pictures as the network sees them, with their boxes."""
    for number in range(min(DRAWN_BATCHES, len(batches))):
        batch = batches[number]
        titles = [""] * len(batch["images"])
        drawing.write_picture(folder / f"train_batch{number}.jpg", drawing.draw_labels(batch, data.names, titles))


RECIPE = Recipe("yolov5", "YOLOv5 on boxes, as YOLOv5's train.py: n to x, n6 to x6", __doc__, Yolov5Options(), run)
