"""Measure a trained YOLOv5 on a data set: precision, recall and mean average precision, curves, pictures with labels and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from train.detection import drawing, figures, folders
from train.detection.batches import Batch
from train.detection.dataset import DetectionSet, read_set
from train.detection.description import find_description
from train.detection.evaluation import Evaluation, evaluate
from train.detection.evaluation_batches import EvaluationBatches, Placed, stride_for
from train.detection.nms import Detections, Suppression
from train.detection.options import FindOptions
from train.detection.predicting import Predictor
from train.detection.weights import load_network
from train.options import option
from train.ranges import check_given, check_positive, dashed
from train.recipe import Recipe

DRAWN_BATCHES = 3
COCO_CLASSES = 80
COCO_CATEGORIES = tuple(number for number in range(1, 91) if number not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
"""COCO numbers its 80 classes with gaps; the file of its annotations has the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValOptions(FindOptions):
    """The options of YOLOv5's val.py that mean something here, and those of the device."""

    data: str = option("coco128", "model and data", "a data.yaml, or the name of a shipped one", metavar="FILE|NAME")
    data_dir: Path | None = option(
        None, "model and data", "the data set's folder or its parent; else $TPUFLOW_DATA, the user's cache", Path, metavar="FOLDER"
    )
    weights: Path | None = option(None, "model and data", "trained weights", Path, metavar="FILE")
    task: str = option("val", "model and data", "the split to measure on", choices=("train", "val", "test"))
    batch_size: int = option(32, "model and data", "pictures a step", int)
    workers: int = option(2, "model and data", "threads that read pictures", int)
    save_json: bool = option(False, "output", "write all detections as COCO's result files are", flag="--save-json")
    project: Path = option(Path("runs/val"), "output", "folder of runs", Path, metavar="FOLDER")

    def check(self) -> None:
        """That weights are given and numbers are in their ranges.

        Raises:
          ConfigError: not so.
        """
        FindOptions.check(self)
        check_positive(self, ("batch_size", "workers"), dashed)
        check_given(self, {"weights": "a file of trained weights"}, dashed)


def run(options: ValOptions) -> None:
    """Measure, print the table, write the files."""
    description = find_description(options.data, options.data_dir)
    data = read_set(description, options.task)
    print(data.summary(), flush=True)
    trained = load_network(options.weights, description.names)
    suppression = Suppression(confidence=options.conf_thres, iou=options.iou_thres, most=options.max_det, several=True)
    predictor = Predictor(trained.network, trained.variables, suppression, options.policy, options)
    batches = EvaluationBatches(data, options.imgsz, options.batch_size, stride_for(trained.network.config, options.imgsz))
    folder = folders.run_folder(options.project, options.name, exist_ok=options.exist_ok)
    found = evaluate(predictor, batches, threads=options.workers, watch=partial(draw_batch, folder, data))
    print(found.table(), flush=True)
    figures.draw_evaluation(found, folder)
    _write(options, folder, found)
    print(predictor.modelled(f"the last batch of {options.batch_size}"))
    print(f"Results are in {folder}", flush=True)


def draw_batch(folder: Path, data: DetectionSet, number: int, batch: Batch, placed: Sequence[Placed], detections: Detections) -> None:
    """val_batch0_labels.jpg and val_batch0_pred.jpg, and the same for the next two batches."""
    if number >= DRAWN_BATCHES:
        return
    titles = drawing.titles_of(data, placed)
    drawing.write_picture(folder / f"val_batch{number}_labels.jpg", drawing.draw_labels(batch, data.names, titles))
    drawing.write_picture(folder / f"val_batch{number}_pred.jpg", drawing.draw_detections(batch, detections, data.names, titles))


def _write(options: ValOptions, folder: Path, found: Evaluation) -> None:
    data = found.data
    if options.save_txt:
        for index, one in found.found.items():
            picture = data.pictures[index]
            path = folder / "labels" / f"{picture.path.stem}.txt"
            folders.write_text(path, one, picture.width, picture.height, confidences=options.save_conf)
    if options.save_json:
        categories = COCO_CATEGORIES if len(data.names) == COCO_CLASSES else range(len(data.names))
        folders.write_json(folder / f"{Path(str(options.weights)).stem}_predictions.json", data, found.found, categories)


RECIPE = Recipe(
    "yolov5-val",
    "nothing: it measures a YOLOv5 on a data set, as YOLOv5's val.py",
    __doc__,
    ValOptions(conf_thres=0.001, iou_thres=0.6, max_det=300),
    run,
)
