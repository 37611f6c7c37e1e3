"""Evaluation of detections: suppression on the device, matching, average precision, and the files that people look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuflow
from tests import detection_reference as reference
from tests.detection_sets import write_set
from tpuflow.errors import ConfigError
from train.detection import drawing, figures
from train.detection.average_precision import envelope, scores
from train.detection.batches import Batch
from train.detection.confusion import ConfusionMatrix
from train.detection.dataset import DetectionSet, read_set
from train.detection.description import find_description
from train.detection.evaluation import Evaluation, evaluate
from train.detection.evaluation_batches import EvaluationBatches
from train.detection.matching import THRESHOLDS, Found, overlaps, right_at_thresholds
from train.detection.nms import VALIDATION, Detections, Suppression, suppress
from train.detection.results import COLUMNS, append_results, draw_results, read_results
from train.detection.samples import in_pixels

OPTIONS = {
    "validation": VALIDATION,
    "detection": Suppression(),
    "few": Suppression(confidence=0.01, several=True, candidates=30, most=7),
    "chosen": Suppression(confidence=0.1, agnostic=True, classes=(0, 2)),
}


def predictions(rng: np.random.Generator, batch: int, boxes: int, classes: int) -> np.ndarray:
    """Clusters of boxes, float32 [B, N, 5 + C]: around each of a few points many that overlap."""
    points = rng.random((batch, 6, 2)) * 200
    found = np.empty((batch, boxes, 5 + classes), np.float32)
    chosen = rng.integers(6, size=(batch, boxes, 1))
    found[..., :2] = np.take_along_axis(points, chosen, 1) + rng.normal(0, 6, (batch, boxes, 2))
    found[..., 2:4] = rng.uniform(15, 60, (batch, boxes, 2))
    found[..., 4:] = rng.random((batch, boxes, 1 + classes))
    return found


def assert_suppressed(detections: Detections, given: np.ndarray, options: Suppression) -> None:
    for row, one in enumerate(given):
        expected = reference.suppressed(
            one, options.confidence, options.iou, options.most, options.candidates,
            several=options.several, agnostic=options.agnostic, classes=options.classes,
        )  # fmt: skip
        count = len(expected)
        assert np.asarray(detections.valid[row]).tolist() == [True] * count + [False] * (options.most - count)
        np.testing.assert_array_equal(detections.boxes[row][:count], [box for box, _, _ in expected])
        np.testing.assert_array_equal(detections.scores[row][:count], [score for _, score, _ in expected])
        assert np.asarray(detections.classes[row][:count]).tolist() == [kind for _, _, kind in expected]
        assert not np.asarray(detections.boxes[row][count:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_suppression_on_the_device_is_the_references(name: str) -> None:
    options, rng = OPTIONS[name], np.random.default_rng(0)
    on_device = tpuflow.jit(lambda given: suppress(given, options))
    for _ in range(2):
        given = predictions(rng, 2, 24, 3)
        assert_suppressed(on_device(given), given, options)
    given[..., 4] = 0  # nothing is found
    assert not np.asarray(on_device(given).valid).any()


def test_suppression_tile_by_tile_is_the_references() -> None:
    options = Suppression(several=True, most=5, iou=0.5)
    given = predictions(np.random.default_rng(1), 2, 12, 2)
    assert_suppressed(tpuflow.jit(lambda given: suppress(given, options), engine="reference")(given), given, options)


@pytest.mark.parametrize("chip", ["generic", "ascend910", "bm1690", "tpu-v2"])
def test_suppression_of_two_million_candidates_fits_on_a_chip(chip: str) -> None:
    """COCO's 80 classes at 640x640; a sort of them all would not."""
    given = jax.ShapeDtypeStruct((1, 25200, 85), np.float32)
    assert tpuflow.jit(suppress, chip=chip).lower(given).compile().time().seconds > 0


def test_of_equal_scores_the_first_is_kept_and_the_loop_ends_early() -> None:
    given = np.zeros((1, 4, 6), np.float32)
    given[0] = [[10, 10, 8, 8, 1, 0.5], [10, 10, 8, 8, 1, 0.5], [40, 40, 8, 8, 1, 0.5], [10, 10, 9, 8, 1, 0.5]]
    found = jax.jit(lambda given: suppress(given, Suppression()))(given)
    np.testing.assert_array_equal(found.boxes[0, :2], [[6, 6, 14, 14], [36, 36, 44, 44]])
    assert int(found.valid.sum()) == 2


def cases(seed: int) -> tuple[list[list[Any]], list[list[Any]]]:
    """(detections of pictures, best first, labels of pictures), detections being labels that were moved a little, or anything."""
    rng = np.random.default_rng(seed)
    detections, labels = [], []
    for _ in range(rng.integers(1, 4)):
        corners = rng.random((rng.integers(1, 5), 2)) * 100
        boxes = np.concatenate([corners, corners + rng.uniform(8, 50, corners.shape)], axis=1).astype(np.float32)
        labels.append([(box, int(rng.integers(2))) for box in boxes])
        near = rng.integers(len(boxes), size=rng.integers(0, 9))
        moved = boxes[near] + rng.normal(0, 3, (len(near), 4)).astype(np.float32)
        ordered = np.sort(rng.random(len(near)).astype(np.float32))[::-1]
        detections.append([(box, score, int(rng.integers(2))) for box, score in zip(moved, ordered, strict=True)])
    return detections, labels


def found_of(detections: list[Any]) -> Found:
    boxes = np.array([box for box, _, _ in detections], np.float32).reshape(-1, 4)
    return Found(boxes, np.array([score for _, score, _ in detections], np.float32), np.array([kind for *_, kind in detections], np.int32))


def labels_of(labels: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([box for box, _ in labels], np.float32).reshape(-1, 4), np.array([kind for _, kind in labels], np.int32)


def compare(seed: int) -> None:
    """Matching and average precision with the reference's, detection by detection."""
    detections, labels = cases(seed)
    right = [right_at_thresholds(found_of(ours), *labels_of(theirs)) for ours, theirs in zip(detections, labels, strict=True)]
    for place, threshold in enumerate(THRESHOLDS):
        for mine, ours, theirs in zip(right, detections, labels, strict=True):
            assert mine[:, place].tolist() == reference.right(ours, theirs, threshold)
    whole = found_of([one for picture in detections for one in picture])
    kinds = np.concatenate([labels_of(picture)[1] for picture in labels])
    counted = scores(np.concatenate(right), whole.scores, whole.classes, kinds)
    order = np.argsort(-whole.scores, kind="stable")
    for row, kind in enumerate(counted.classes):
        ours = order[whole.classes[order] == kind]
        for column in range(len(THRESHOLDS)):
            expected = reference.average_precision(np.concatenate(right)[ours, column].tolist(), int((kinds == kind).sum()))
            assert counted.ap[row, column] == pytest.approx(expected if len(ours) else 0.0, abs=1e-12)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_matching_and_average_precision_are_the_references(seed: int) -> None:
    compare(seed)


def test_a_detection_whose_label_is_taken_does_not_move_on() -> None:
    labels = np.array([[0, 0, 10, 10], [4, 0, 14, 10]], np.float32)
    found = Found(np.array([[0, 0, 10, 10], [1, 0, 11, 10]], np.float32), np.array([0.9, 0.8], np.float32), np.zeros(2, np.int32))
    assert overlaps(labels, found.boxes)[1, 1] > 0.5
    assert right_at_thresholds(found, labels, np.zeros(2, np.int32))[:, 0].tolist() == [True, False]


def test_average_precision_of_a_curve_known_by_hand() -> None:
    """Right, wrong, right of two labels: precision 1 up to a recall of a half, two thirds up to 1."""
    recalls, heights = envelope([0.5, 0.5, 1.0], [1.0, 0.5, 2 / 3])
    assert recalls.tolist() == [0, 0.5, 0.5, 1, 1]
    np.testing.assert_allclose(heights, [1, 1, 2 / 3, 2 / 3, 0])
    right = np.array([[True] * 10, [False] * 10, [True] * 10])
    made = scores(right, np.array([0.9, 0.8, 0.7]), np.zeros(3, int), np.zeros(2, int))
    assert made.map == pytest.approx(0.5 + 0.5 * 2 / 3, abs=0.006)
    assert made.fitness == pytest.approx(made.map)
    assert (made.true_positives[0], made.false_positives[0]) == (2, 1)


def test_without_detections_all_figures_are_nought() -> None:
    made = scores(np.zeros((0, 10), bool), np.zeros(0), np.zeros(0, int), np.array([0, 1, 1]))
    assert (made.mean_precision, made.mean_recall, made.map50, made.map) == (0, 0, 0, 0)
    assert made.labels.tolist() == [1, 2]


def test_the_confusion_matrix_counts_each_label_and_each_detection_once() -> None:
    matrix = ConfusionMatrix(2)
    labels = np.array([[0, 0, 10, 10], [20, 20, 40, 40], [60, 60, 70, 70]], np.float32)
    boxes = np.array([[0, 0, 10, 9], [0, 1, 10, 10], [21, 20, 40, 40], [80, 80, 90, 90], [60, 60, 70, 70]], np.float32)
    found = Found(boxes, np.array([0.9, 0.8, 0.7, 0.6, 0.2], np.float32), np.array([0, 0, 1, 1, 0]))
    matrix.add(found, labels, np.array([0, 0, 1]))
    assert matrix.counts.tolist() == [[1, 0, 1], [1, 0, 1], [0, 1, 0]]
    np.testing.assert_allclose(matrix.shares(), [[0.5, 0, 0.5], [0.5, 0, 0.5], [0, 1, 0]])


class Oracle:
    """Predicts the labels of the batch, moved by some pixels, and something wrong beside them."""

    def __init__(self, moved: float):
        self.moved, self.rng = moved, np.random.default_rng(0)

    def __call__(self, batch: Batch) -> tuple[Detections, np.ndarray]:
        height, width = batch["images"].shape[1:3]
        boxes = np.stack([in_pixels(one, width, height) for one in batch["boxes"]])
        boxes += self.rng.normal(0, self.moved, boxes.shape).astype(np.float32) if self.moved else 0
        values = np.linspace(0.9, 0.3, boxes.shape[1], dtype=np.float32)[None] * batch["valid"]
        return Detections(boxes, values, batch["classes"], batch["valid"]), np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DetectionSet:
    return read_set(find_description(str(write_set(tmp_path_factory.mktemp("set"), 10))), "val")


def test_who_predicts_the_labels_gets_full_marks_and_whoever_is_near_fewer(data: DetectionSet) -> None:
    perfect, near = (evaluate(Oracle(moved), EvaluationBatches(data, 64, 4)) for moved in (0.0, 2.0))
    assert perfect.scores.map == pytest.approx(0.995, abs=1e-3)  # the curve falls to 0 at a recall of 1, as in YOLOv5
    assert perfect.scores.map50 > near.scores.map50 > near.scores.map > 0.2
    assert perfect.losses is not None
    assert perfect.losses.tolist() == [1, 2, 3]
    assert sorted(perfect.found) == list(range(10))
    assert perfect.confusion.counts[:2, :2].trace() == perfect.confusion.counts.sum() == data.boxes
    head, whole, *rows = perfect.table().splitlines()
    assert head.split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert whole.split()[:3] == ["all", "10", str(data.boxes)]
    assert [row.split()[0] for row in rows] == list(data.names)


def test_curves_and_pictures_are_written(data: DetectionSet, tmp_path: Path) -> None:
    near: Evaluation = evaluate(Oracle(2.0), EvaluationBatches(data, 64, 4))
    figures.draw_evaluation(near, tmp_path)
    names = {"PR_curve.png", "P_curve.png", "R_curve.png", "F1_curve.png", "confusion_matrix.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    batch, placed = EvaluationBatches(data, 64, 4)[0]
    titles = drawing.titles_of(data, placed)
    shown = drawing.draw_labels(batch, data.names, titles)
    height, width = batch["images"].shape[1:3]
    assert shown.shape == (2 * height, 2 * width, 3)
    drawing.write_picture(tmp_path / "labels.jpg", shown)
    assert cv2.imread(str(tmp_path / "labels.jpg")).shape == shown.shape
    assert drawing.draw_detections(batch, Oracle(1.0)(batch)[0], data.names).shape == shown.shape


def test_results_are_a_table_in_the_originals_columns(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    for epoch in range(3):
        append_results(path, epoch, np.arange(len(COLUMNS)) / (epoch + 1))
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert {len(line) for line in lines} == {(1 + len(COLUMNS)) * 21 - 1}
    table = read_results(path)
    assert table["epoch"] == [0, 1, 2]
    assert table["x/lr2"] == [12, 6, 4]
    draw_results(path)
    assert (tmp_path / "results.png").stat().st_size > 1000
    path.write_text("epoch\nnone\n")
    with pytest.raises(ConfigError, match="cannot be read as a table of results"):
        read_results(path)
