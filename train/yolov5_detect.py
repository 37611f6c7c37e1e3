"""Find objects in pictures with a trained YOLOv5: the pictures with boxes drawn on them, and text files, in a folder of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpuflow.errors import ConfigError, DataError
from train.detection import drawing, folders
from train.detection.description import find_names
from train.detection.evaluation import in_picture
from train.detection.evaluation_batches import Placed, stride_for
from train.detection.matching import Found
from train.detection.nms import Suppression
from train.detection.options import FindOptions
from train.detection.pictures import SUFFIXES, letterbox, read
from train.detection.predicting import Predictor
from train.detection.weights import load_network
from train.options import option
from train.ranges import check_given, check_positive, dashed
from train.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectOptions(FindOptions):
    """The options of YOLOv5's detect.py that mean something here, and those of the device."""

    weights: Path | None = option(None, "model and pictures", "trained weights", Path, metavar="FILE")
    source: Path | None = option(None, "model and pictures", "a picture or a folder of them", Path, metavar="FOLDER|FILE")
    data: str | None = option(
        None,
        "model and pictures",
        "a data.yaml, or the name of a shipped one: the names of classes; else the weights'",
        metavar="FILE|NAME",
    )
    classes: Sequence[int] | None = option(None, "detections", "find these classes only, such as 0 2", int, nargs="+")
    agnostic_nms: bool = option(False, "detections", "boxes of different classes suppress each other", flag="--agnostic-nms")
    nosave: bool = option(False, "output", "write no pictures", flag="--nosave")
    line_thickness: int = option(3, "output", "of boxes, in pixels", int)
    project: Path = option(Path("runs/detect"), "output", "folder of runs", Path, metavar="FOLDER")

    def check(self) -> None:
        """That weights and pictures are given and numbers are in their ranges.

        Raises:
          ConfigError: not so.
        """
        FindOptions.check(self)
        check_positive(self, ("line_thickness",), dashed)
        check_given(self, {"weights": "a file of trained weights", "source": "a picture or a folder of them"}, dashed)


def run(options: DetectOptions) -> None:
    """Detect in one picture after another; a line for each."""
    files = pictures_at(Path(str(options.source)))
    names = find_names(options.data) if options.data else None
    trained = load_network(options.weights, names)
    stride = stride_for(trained.network.config, options.imgsz)
    wanted = _checked_classes(options.classes, trained.names)
    suppression = Suppression(
        confidence=options.conf_thres, iou=options.iou_thres, most=options.max_det, agnostic=options.agnostic_nms, classes=wanted
    )
    predictor = Predictor(trained.network, trained.variables, suppression, options.policy, options)
    folder = folders.run_folder(options.project, options.name, exist_ok=options.exist_ok)
    for number, file in enumerate(files, 1):
        image = read(file)
        found = detect(predictor, image, options.imgsz, stride)
        print(f"{number}/{len(files)} {file}: {image.shape[0]}x{image.shape[1]} {in_words(found, trained.names)}", flush=True)
        if options.save_txt:
            path = folder / "labels" / f"{file.stem}.txt"
            folders.write_text(path, found, image.shape[1], image.shape[0], confidences=options.save_conf)
        if not options.nosave:
            drawn = drawing.draw_boxes(image, found, trained.names, line=options.line_thickness)
            drawing.write_picture(folder / file.name, drawn)
    print(predictor.modelled("the last picture"))
    print(f"Results are in {folder}", flush=True)


def detect(predictor: Predictor, image: np.ndarray, size: int, stride: int) -> Found:
    """What is found in a picture uint8 [H, W, 3], in its own pixels.

    The longer side of its frame has `size` pixels, the other a multiple of `stride`.
    """
    framed = letterbox(image, (size, size), minimal_stride=stride)
    place = Placed(0, image.shape[1], image.shape[0], (framed.gain, framed.gain), framed.left, framed.above)
    return in_picture(predictor({"images": framed.image[None]})[0], 0, place)


def pictures_at(source: Path) -> list[Path]:
    """The picture, or the pictures in the folder, sorted by name.

    Raises:
      DataError: there is none.
    """
    if source.is_file() and source.suffix.lower() in SUFFIXES:
        return [source]
    found = sorted(path for path in source.iterdir() if path.suffix.lower() in SUFFIXES) if source.is_dir() else []
    if not found:
        what = "no picture in it" if source.is_dir() else "no picture" if source.exists() else "no such file or folder"
        raise DataError(f"--source {source}: {what}; expected files that end in {', '.join(sorted(SUFFIXES))}.")
    return found


def in_words(found: Found, names: Sequence[str]) -> str:
    """Such as "3 RBC, 1 WBC"."""
    counts = Counter(found.classes.tolist())
    return ", ".join(f"{count} {names[kind]}" for kind, count in sorted(counts.items())) or "nothing found"


def _checked_classes(classes: Sequence[int] | None, names: Sequence[str]) -> tuple[int, ...] | None:
    for one in classes or ():
        if not 0 <= one < len(names):
            raise ConfigError(f"--classes {one}: expected 0 to {len(names) - 1}: {', '.join(names)}.")
    return None if classes is None else tuple(classes)


RECIPE = Recipe(
    "yolov5-detect", "nothing: it finds objects in pictures with a YOLOv5, as YOLOv5's detect.py", __doc__, DetectOptions(), run
)
