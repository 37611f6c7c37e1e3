"""`python -m train yolov5-val` and `yolov5-detect`, with a small network of random weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
import pytest

from models.yolov5 import TORCH_LAYERS, YOLOv5, decode
from models.yolov5_config import Config
from tests import detection_reference as reference
from tests.detection_sets import NAMES, write_set
from tpuflow.errors import ConfigError
from tpuflow.importers import save_state_dict, state_dict
from train.__main__ import main
from train.detection.dataset import read_set
from train.detection.description import find_description
from train.detection.evaluation_batches import EvaluationBatches
from train.detection.folders import run_folder
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss
from train.detection.nms import Suppression
from train.detection.predicting import LOSSES, Predictor
from train.detection.weights import load_network
from train.yolov5_detect import DetectOptions
from train.yolov5_val import ValOptions

CONFIG = Config(
    1 / 9, 0.125, len(NAMES), anchors=(((4, 5), (8, 6), (6, 11)), ((10, 10), (12, 20), (20, 12)), ((16, 16), (22, 28), (30, 20)))
)


def drawn_variables() -> Any:
    """Kernels that keep the size of what goes through them, norms that change nothing; objectness and classes are likely from the start."""
    rng = np.random.default_rng(0)
    like = jax.eval_shape(YOLOv5(CONFIG).init, jax.random.key(0), np.zeros((1, 64, 64, 3), np.float32))
    fill = {"kernel": lambda shape: rng.normal(0, 1.7 / math.sqrt(math.prod(shape[:-1])), shape), "scale": np.ones, "var": np.ones}
    variables = jax.tree_util.tree_map_with_path(lambda path, leaf: fill.get(path[-1].key, np.zeros)(leaf.shape).astype(np.float32), like)
    for index in range(3):
        variables["params"]["model_24"][f"m_{index}"]["bias"] += np.tile(np.array([0, 0, 0, 0, 4, 1, 1], np.float32), 3)
    return variables


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.yaml with its pictures, and weights.safetensors of a network that finds something everywhere."""
    made = tmp_path_factory.mktemp("home")
    write_set(made, 5)
    state = state_dict(drawn_variables(), TORCH_LAYERS)
    state["model.24.anchors"] = np.array(CONFIG.anchors, np.float32) / np.array(CONFIG.strides, np.float32)[:, None, None]
    save_state_dict(made / "weights.safetensors", state)
    return made


def test_sizes_anchors_and_classes_are_read_off_the_weights(home: Path) -> None:
    found = load_network(home / "weights.safetensors")
    assert found.network.config == CONFIG
    assert found.names == ("0", "1")


@pytest.mark.slow
def test_a_program_gives_the_references_detections_and_the_losses_of_plain_jax(home: Path) -> None:
    found = load_network(home / "weights.safetensors", NAMES)
    data = read_set(find_description(str(home / "data.yaml")), "val")
    batch, _ = EvaluationBatches(data, 64, 2, rectangular=False)[0]
    options, loss = Suppression(confidence=0.3, most=20), DetectionLoss(CONFIG, Hyperparameters(), 64)
    detections, losses = Predictor(found.network, found.variables, options, loss=loss)(batch)
    maps = jax.jit(found.network.apply)(found.variables, batch["images"].astype(np.float32) / 255)
    given = np.asarray(decode(maps, CONFIG))
    for row in range(2):
        expected = reference.suppressed(given[row], 0.3, options.iou, 20, 30000, several=False, agnostic=False, classes=None)
        count = int(detections.valid[row].sum())
        assert count == len(expected) > 0
        np.testing.assert_allclose(detections.boxes[row, :count], [box for box, _, _ in expected], atol=1e-3)
        np.testing.assert_allclose(detections.scores[row, :count], [score for _, score, _ in expected], atol=1e-5)
    plain = loss(maps, batch)[1]
    assert losses is not None
    np.testing.assert_allclose(losses, [plain[name] for name in LOSSES], rtol=1e-4)


@pytest.mark.slow
def test_val_writes_what_people_look_at(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", str(home / "data.yaml"), "--weights", str(home / "weights.safetensors"), "--img", "64", "--batch-size", "6"]
    others = ["--project", str(home / "runs"), "--save-txt", "--save-conf", "--save-json", "--max-det", "20", "--policy", "fp16"]
    assert main(["yolov5-val", *given, *others]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("val: 5 pictures, ")
    assert said[1].split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert said[-2].startswith("the last batch of 6: ")
    assert said[-2].endswith(" ms (modelled on generic, fp16; up to 20 boxes a picture)")
    assert said[-1] == f"Results are in {home / 'runs/exp'}"
    folder = home / "runs" / "exp"
    expected = {"val_batch0_labels.jpg", "val_batch0_pred.jpg", "PR_curve.png", "confusion_matrix.png"}
    assert expected <= {path.name for path in folder.iterdir()}
    rows = json.loads((folder / "weights_predictions.json").read_text())
    lines = [line.split() for path in (folder / "labels").iterdir() for line in path.read_text().splitlines()]
    assert 0 < len(rows) == len(lines) <= 100
    assert all(len(line) == 6 and all(0 <= float(share) <= 1 for share in line[1:]) for line in lines)
    assert set(rows[0]) == {"image_id", "category_id", "bbox", "score"}


@pytest.mark.slow
def test_detect_draws_boxes_on_each_picture(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = home / "two"
    source.mkdir()
    for number in range(2):
        cv2.imwrite(str(source / f"{number}.png"), np.full((50, 70, 3), 90 + number, np.uint8))
    given = ["--weights", str(home / "weights.safetensors"), "--source", str(source), "--img", "64", "--max-det", "3", "--save-txt"]
    run_folder(home / "found", "exp", exist_ok=False)
    assert main(["yolov5-detect", *given, "--conf-thres", "0.1", "--project", str(home / "found"), "--classes", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"1/2 {source / '0.png'}: 50x70 3 1"
    assert said[-1] == f"Results are in {home / 'found/exp2'}"
    for number in range(2):
        drawn = cv2.imread(str(home / "found" / "exp2" / f"{number}.png"))
        assert (drawn != 90 + number).any()
        lines = (home / "found" / "exp2" / "labels" / f"{number}.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["1"] * 3


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (ValOptions, {"imgsz": 100}, "--imgsz: expected a multiple of the network's stride 32, got 100; try 96"),
        (ValOptions, {"batch_size": 0}, "--batch-size: expected 1 or more, got 0"),
        (ValOptions, {"conf_thres": 1.5}, "--conf-thres: expected 0 to 1, got 1.5"),
        (ValOptions, {"max_det": 0}, "--max-det: expected 1 or more, got 0"),
        (ValOptions, {"weights": None}, "--weights: give a file"),
        (DetectOptions, {"source": None}, "--source: give a picture"),
        (DetectOptions, {"line_thickness": 0}, "--line-thickness: expected 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, given: dict[str, Any], message: str) -> None:
    one = options(weights=Path("w.pt"), **({"source": Path(".")} if options is DetectOptions else {}))
    with pytest.raises(ConfigError, match=message):
        replace(one, **given).check()
