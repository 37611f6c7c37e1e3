"""Runs of the YOLOv5 recipe beside PyTorch: `python -m train.parity yolov5 FOLDER ...` trains PyTorch's network as the first run was.

It starts from the same weights and takes the same batches, rates, momenta and number of steps, in fp32. The last weights of each, averaged
as the recipe has it, are held against the validation pictures by the recipe's own evaluation.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.yolov5 import TORCH_LAYERS
from tpuflow.errors import ConfigError
from tpuflow.importers import flax_params, state_dict
from train.detection import run_files
from train.detection.batches import Batch, TrainingBatches
from train.detection.evaluation import evaluate
from train.detection.evaluation_batches import EvaluationBatches
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss
from train.detection.nms import VALIDATION
from train.detection.predicting import Predictor
from train.detection.schedules import Plan
from train.detection.transfer import save_network
from train.detection.weights import load_network
from train.pipeline import Loader
from train.published import exit_status, judged
from train.yolov5 import EMA, Job, Yolov5Options, prepare, resumed

BOUND = 0.05
"""Between the mAP@0.5 of any two of them."""
TORCH = "PyTorch"


@dataclass(frozen=True, slots=True)
class Finished:
    """A run's folder, options and job."""

    folder: Path
    options: Yolov5Options
    job: Job

    @classmethod
    def of(cls, folder: Path, data_dir: Path | None) -> Finished:
        """What a folder says of its run.

        Raises:
          ConfigError: it is none of the recipe's, or has no weights yet.
        """
        options, _ = resumed(Yolov5Options(resume=str(folder)))
        options = replace(options, data_dir=data_dir or options.data_dir)
        found = cls(folder, options, prepare(options))
        if not found.last.exists():
            raise ConfigError(f"{folder}: the run has written no weights yet; expected {found.last}.")
        return found

    @property
    def last(self) -> Path:
        """The weights at its end."""
        return self.folder / run_files.WEIGHTS / f"last{run_files.KIND}"

    def map50(self, weights: Path, policy: str) -> float:
        """mAP@0.5 of weights on the run's validation pictures, the network in a policy's precision."""
        trained = load_network(weights, self.job.val.names)
        batches = EvaluationBatches(self.job.val, self.options.imgsz, self.options.batch_size, rectangular=False)
        predictor = Predictor(trained.network, trained.variables, VALIDATION, policy, self.options)
        return evaluate(predictor, batches, threads=self.options.workers).scores.map50


def pytorch(run: Finished, weights: Path) -> list[float]:
    """Train PyTorch's network as a run was, write its averaged weights; the losses of all steps, sums over the pictures of a batch.

    Raises:
      ConfigError: PyTorch's loop does not do what the run did.
    """
    import torch

    from train.torch_yolov5 import Network, train

    options, job = run.options, run.job
    usual = Hyperparameters()
    weighted = [name for name in ("fl_gamma", "cls_pw", "obj_pw") if getattr(job.hyp, name) != getattr(usual, name)]
    if options.optimizer != "SGD" or job.frozen or options.label_smoothing or weighted:
        raise ConfigError(
            f"{run.folder}: PyTorch's loop has SGD only, no frozen layers, no smoothed labels, and the usual fl_gamma, cls_pw and obj_pw; "
            "compare a run without them."
        )
    batches = TrainingBatches(job.train, options.imgsz, options.batch_size, job.hyp, options.seed, keep=options.cache)
    plan = Plan(job.hyp, options.epochs, len(batches), options.batch_size, options.cos_lr)
    network = Network(job.network.config).train()
    own = {name: torch.from_numpy(array.copy()) for name, array in state_dict(job.variables, TORCH_LAYERS).items()}
    network.load_state_dict(own, strict=False)
    loader = Loader(batches, threads=options.workers)
    trained = train(network, _all(loader, options), DetectionLoss(job.network.config, job.hyp, options.imgsz), plan, EMA)
    averaged = {name: trained.average[name].numpy() for name in own}
    save_network(weights, job.network.config, flax_params(averaged, job.variables, TORCH_LAYERS))
    return trained.losses


def _all(loader: Loader, options: Yolov5Options) -> Iterator[Batch]:
    """Every batch of the training, an epoch after the other."""
    for epoch in range(options.epochs):
        print(f"{TORCH}: epoch {epoch + 1}/{options.epochs}", flush=True)
        yield from loader


def report(runs: Sequence[Finished]) -> dict[str, Any]:
    """The mAP@0.5 of every run and PyTorch's, and how many pairs of them are too far apart."""
    first = runs[0]
    weights = first.folder / run_files.WEIGHTS / f"torch{run_files.KIND}"
    losses = pytorch(first, weights)
    found = {f"{run.folder.name} ({run.options.policy})": run.map50(run.last, run.options.policy) for run in runs}
    found[TORCH] = first.map50(weights, "fp32")
    apart = [abs(a - b) for a, b in itertools.combinations(found.values(), 2)]
    settings = {name: getattr(first.options, name) for name in ("data", "cfg", "imgsz", "batch_size", "epochs", "seed")}
    return {"settings": settings, "mAP50": found, "failed": sum(not x <= BOUND for x in apart), "torch_losses": losses}


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{name:24} mAP@0.5 {value:.3f}" for name, value in figures["mAP50"].items()]
    return "\n".join([*lines, f"{figures['failed']} pairs are more than {BOUND:g} apart"])


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, print, write JSON; 0 if every bound holds, 1 if one fails, 2 for bad folders or data, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.parity yolov5", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run of `python -m train yolov5`")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; else that of the run")
    parser.add_argument("--json", type=Path, default=Path("parity_yolov5.json"), metavar="FILE", help="[%(default)s]")
    options = parser.parse_args(argv)
    return exit_status(
        lambda: judged(report([Finished.of(folder, options.data_dir) for folder in options.folders]), table, options.json), options.json
    )
