"""Measure a trained YOLOv5 on a data set: precision, recall and mean average precision, curves, pictures with labels and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tpuflow.errors import ConfigError
from train.detection import drawing, figures, folders
from train.detection.batches import Batch
from train.detection.dataset import DetectionSet, read_set
from train.detection.description import find_description
from train.detection.evaluation import Evaluation, evaluate
from train.detection.evaluation_batches import EvaluationBatches, Placed
from train.detection.nms import Detections, Suppression
from train.detection.predicting import Device, Predictor
from train.detection.weights import load_network
from train.options import option
from train.recipe import Recipe

DRAWN_BATCHES = 3
COCO_CLASSES = 80
COCO_CATEGORIES = tuple(number for number in range(1, 91) if number not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
"""COCO numbers its 80 classes with gaps; the file of its annotations has the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValOptions:
    """The options of YOLOv5's val.py that mean something here, and those of the device."""

    data: str = option("coco128", "model and data", "a data.yaml, or the name of a shipped one", metavar="FILE|NAME")
    data_dir: Path | None = option(
        None, "model and data", "the data set's folder or its parent; else $TPUFLOW_DATA, the user's cache", Path, metavar="FOLDER"
    )
    weights: Path | None = option(None, "model and data", "trained weights", Path, metavar="FILE")
    task: str = option("val", "model and data", "the split to measure on", choices=("train", "val", "test"))
    imgsz: int = option(640, "model and data", "longer side of the pictures in pixels", int, also=("--img", "--img-size"))
    batch_size: int = option(32, "model and data", "pictures a step", int)
    workers: int = option(2, "model and data", "threads that read pictures", int)
    conf_thres: float = option(0.001, "detections", "least score", float)
    iou_thres: float = option(0.6, "detections", "boxes of a class that overlap more than this are one", float)
    max_det: int = option(300, "detections", "the most of a picture", int)
    save_txt: bool = option(False, "output", "write labels/NAME.txt for each picture", flag="--save-txt")
    save_conf: bool = option(False, "output", "scores in these files", flag="--save-conf")
    save_json: bool = option(False, "output", "write all detections as COCO's result files are", flag="--save-json")
    project: Path = option(Path("runs/val"), "output", "folder of runs", Path, metavar="FOLDER")
    name: str = option("exp", "output", "folder of this run in --project; a number is added where it exists")
    exist_ok: bool = option(False, "output", "use the folder though it exists", flag="--exist-ok")
    policy: str = option("fp32", "device", "precision of the network, such as fp32, fp16, mixed or bf16")
    chip: str = option("generic", "device", "row of the chip catalogue")
    engine: str = option("fast", "device", "XLA, or NumPy tile by tile: slow", choices=("fast", "reference"))
    fidelity: str = option("native", "device", "sums as the host orders them, or the device", choices=("native", "bitexact"))

    def check(self) -> None:
        """That weights are given and numbers are in their ranges.

        Raises:
          ConfigError: not so.
        """
        check_numbers(self.imgsz, self.conf_thres, self.iou_thres, self.max_det)
        for name in ("batch_size", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(self, name)}.")
        if self.weights is None:
            raise ConfigError("--weights: give a file of trained weights.")


def check_numbers(imgsz: int, conf_thres: float, iou_thres: float, max_det: int) -> None:
    """The options that finding objects has in common.

    Raises:
      ConfigError: one is out of its range.
    """
    if imgsz < 32 or imgsz % 32:
        raise ConfigError(f"--imgsz: expected a multiple of the network's stride 32, got {imgsz}; try {max(32, round(imgsz / 32) * 32)}.")
    for name, value in (("conf-thres", conf_thres), ("iou-thres", iou_thres)):
        if not 0 <= value <= 1:
            raise ConfigError(f"--{name}: expected 0 to 1, got {value}.")
    if max_det < 1:
        raise ConfigError(f"--max-det: expected 1 or more, got {max_det}.")


def run(options: ValOptions) -> None:
    """Measure, print the table, write the files."""
    description = find_description(options.data, options.data_dir)
    data = read_set(description, options.task)
    print(data.summary(), flush=True)
    trained = load_network(options.weights, description.names)
    suppression = Suppression(confidence=options.conf_thres, iou=options.iou_thres, most=options.max_det, several=True)
    device = Device(policy=options.policy, chip=options.chip, engine=options.engine, fidelity=options.fidelity)
    predictor = Predictor(trained.network, trained.variables, suppression, device)
    batches = EvaluationBatches(data, options.imgsz, options.batch_size)
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


RECIPE = Recipe("yolov5-val", "nothing: it measures a YOLOv5 on a data set, as YOLOv5's val.py", __doc__, ValOptions(), run)
