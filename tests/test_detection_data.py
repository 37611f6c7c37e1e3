"""Detection data: descriptions, labels, frames, mosaics, batches."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests import detection_reference as reference
from tests.detection_sets import NAMES, write_set
from tpuflow.data import places
from tpuflow.errors import ConfigError, DataError
from tpuflow.examples.download import UnreachableError
from train.detection import blood_cells, pictures
from train.detection.augmentation import Augmentation
from train.detection.batches import TrainingBatches
from train.detection.dataset import DetectionSet, label_file, read_set
from train.detection.description import find_description
from train.detection.evaluation_batches import EvaluationBatches
from train.detection.labels import read_labels
from train.detection.mosaic import Labelled, mosaic
from train.detection.samples import flipped, in_pixels, in_shares
from train.detection.warping import Warp, warp
from train.pipeline import Loader


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DetectionSet:
    return read_set(find_description(str(write_set(tmp_path_factory.mktemp("set")))), "train")


def noise(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def test_a_set_is_read_with_all_its_labels(small: DetectionSet) -> None:
    assert len(small.pictures) == 6
    assert small.names == NAMES
    assert small.boxes == sum(len(label_file(picture.path).read_text().splitlines()) for picture in small.pictures)
    assert small.problems == ()
    assert small.summary() == f"train: 6 pictures, {small.boxes} boxes"


@pytest.mark.parametrize("names", ["{0: red, 1: green}", "[red, green]"])
def test_names_may_be_a_list_or_numbered_and_paths_a_list_of_folders_or_files(tmp_path: Path, names: str) -> None:
    root = write_set(tmp_path / "set").parent
    listed = sorted((root / "images/val").iterdir())[:2]
    (root / "some.txt").write_text("".join(f"./images/val/{path.name}\n" for path in listed))
    file = tmp_path / "other.yaml"
    file.write_text(f"path: set\ntrain: [images/train, some.txt]\nval: ../images/val\nnames: {names}\n")
    description = find_description(str(file))
    assert description.names == NAMES
    assert [path.resolve() for path in description.pictures("train")[-2:]] == listed
    assert len(description.pictures("val")) == 6


VOC = """<annotation><size><width>100</width><height>50</height></size>
<object><name>green</name><difficult>0</difficult><bndbox><xmin>11</xmin><ymin>6</ymin><xmax>31</xmax><ymax>26</ymax></bndbox></object>
<object><name>red</name><difficult>1</difficult><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>
<object><name>blue</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"""


def test_voc_sets_are_read_as_they_are_published(tmp_path: Path) -> None:
    for folder, file, text in (("ImageSets/Main", "train.txt", "a\n"), ("Annotations", "a.xml", VOC)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).write_text(text)
    (tmp_path / "JPEGImages").mkdir()
    cv2.imwrite(str(tmp_path / "JPEGImages" / "a.jpg"), np.zeros((50, 100, 3), np.uint8))
    (tmp_path / "voc.yaml").write_text("train: ImageSets/Main/train.txt\nnames: [red, green]\n")
    found = read_set(find_description(str(tmp_path / "voc.yaml")), "train")
    assert found.pictures[0].labels.classes.tolist() == [1]
    np.testing.assert_allclose(found.pictures[0].labels.boxes, [[0.2, 0.3, 0.2, 0.4]], rtol=1e-6)
    assert found.problems == (f"{tmp_path / 'Annotations/a.xml'}: object 3: there is no class 'blue'; expected one of red, green",)


def test_bad_labels_are_named_by_line_and_left_out(tmp_path: Path) -> None:
    rows = {
        "0 0.5 0.5 0.2 0.2": None,
        "2 0.5 0.5 0.2 0.2": "there is no class 2; expected 0 to 1, as the data set names 2",
        "-1 0.5 0.5 0.2 0.2": "there is no class -1",
        "0.5 0.5 0.5 0.2 0.2": "there is no class 0.5",
        "0 320 0.5 0.2 0.2": "320 is no share of the picture",
        "0 0.5 -0.1 0.2 0.2": "-0.1 is no share of the picture",
        "0 0.5 0.5 0.2": "expected 5 columns (class centre-x centre-y width height), got 4",
        "0 0.5 x 0.2 0.2": "'x' is not a number",
        "0 nan 0.5 0.2 0.2": "'nan' is not a finite number",
        "0 0.5 0.5 0 0.2": "a box of no area",
        "0 0.5 0.50 0.2 0.2": "the same label again",
        "1 0.1 0.1 0.3 0.1 0.3 0.5": None,
        "": None,
    }
    file = tmp_path / "a.txt"
    file.write_text("\n".join(rows))
    labels, problems = read_labels(file, NAMES)
    expected = [f"{file}:{number}: {text}" for number, text in enumerate(rows.values(), 1) if text]
    assert len(problems) == len(expected)
    assert all(found.startswith(wanted) for found, wanted in zip(problems, expected, strict=True))
    assert labels.classes.tolist() == [0, 1]
    np.testing.assert_allclose(labels.boxes, [[0.5, 0.5, 0.2, 0.2], [0.2, 0.3, 0.2, 0.4]], rtol=1e-6)


def test_damaged_pictures_are_named_and_left_out(tmp_path: Path) -> None:
    file = write_set(tmp_path, splits=("train",))
    folder = tmp_path / "images" / "train"
    whole = cv2.imencode(".jpg", noise(np.random.default_rng(0), 64, 64))[1].tobytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "followed.jpg").write_bytes(whole + b"\0\0")
    (folder / "none.jpg").write_bytes(b"")
    cv2.imwrite(str(folder / "tiny.png"), np.zeros((9, 40, 3), np.uint8))
    found = read_set(find_description(str(file)), "train")
    assert [picture.path.name for picture in found.pictures if not picture.labelled] == ["followed.jpg"]
    assert {Path(problem.partition(": ")[0]).name for problem in found.problems} == {"cut.jpg", "none.jpg", "tiny.png"}
    assert found.summary().startswith("train: 7 pictures,")
    assert "; 3 left out:\n" in found.summary()


def test_a_picture_lies_as_its_exif_says(tmp_path: Path) -> None:
    file = write_set(tmp_path, 1, splits=("train",))
    path = tmp_path / "images" / "train" / "0.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (60, 40)).save(path, exif=exif)
    (tmp_path / "images" / "train" / "0.png").unlink()
    (picture,) = read_set(find_description(str(file)), "train").pictures
    assert (picture.width, picture.height) == (40, 60)
    assert pictures.read(path).shape == (60, 40, 3)


@given(st.integers(0, 2**32), st.integers(10, 60), st.integers(10, 60), st.integers(1, 2), st.integers(1, 2))
def test_a_frame_is_the_references_pixel_for_pixel(seed: int, height: int, width: int, rows: int, columns: int) -> None:
    image = noise(np.random.default_rng(seed), height, width)
    framed = pictures.letterbox(image, (rows * 32, columns * 32))
    np.testing.assert_array_equal(framed.image, reference.letterboxed(image, rows * 32, columns * 32))


@given(st.integers(0, 2**32), st.integers(8, 24))
def test_a_mosaic_is_the_references_pixel_for_pixel_and_boxes_stay_on_their_objects(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    images = [noise(rng, *rng.integers(size // 2, size + 1, 2)) for _ in range(4)]
    centre = int(rng.integers(size // 2, 2 * size - size // 2)), int(rng.integers(size // 2, 2 * size - size // 2))
    whole = [Labelled(image, np.array([[0, 0, image.shape[1], image.shape[0]]], np.float32), np.zeros(1, np.int32)) for image in images]
    made = mosaic(whole, centre, size)
    np.testing.assert_array_equal(made.image, reference.mosaic(images, *centre, size))
    for image, (left, top, right, bottom), corner in zip(images, made.boxes.astype(int), ((1, 1), (1, 0), (0, 1), (0, 0)), strict=True):
        part = made.image[top:bottom, left:right]
        rows = slice(len(image) - len(part), None) if corner[0] else slice(len(part))
        columns = slice(image.shape[1] - part.shape[1], None) if corner[1] else slice(part.shape[1])
        np.testing.assert_array_equal(part, image[rows, columns])


@given(st.floats(-0.2, 0.2), st.floats(0.7, 1.3), st.floats(-30, 30), st.floats(-8, 8), st.floats(-5e-4, 5e-4))
def test_a_warped_box_is_the_one_around_its_warped_object(shift: float, scale: float, degrees: float, shear: float, tilt: float) -> None:
    image = np.zeros((200, 200, 3), np.uint8)
    image[80:120, 70:140] = 255
    chosen = Warp(perspective=(tilt, -tilt), degrees=degrees, scale=scale, shear_degrees=(shear, 0.0), shift=(0.5 + shift, 0.5))
    warped, boxes, kept = warp(image, np.array([[70, 80, 140, 120]], np.float32), chosen, (200, 200))
    rows, columns = np.nonzero((warped == 255).all(2))
    if kept.tolist() == [0] and len(rows):
        around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(boxes[0], around, atol=4)


def test_boxes_that_are_hardly_left_are_dropped() -> None:
    boxes = np.array([[0, 0, 50, 50], [45, 0, 95, 50], [60, 60, 62, 90]], np.float32)
    _, moved, kept = warp(np.zeros((100, 100, 3), np.uint8), boxes, Warp(shift=(0.03, 0.5)), (100, 100))
    assert kept.tolist() == [1]
    np.testing.assert_allclose(moved, [[0, 0, 48, 50]], atol=1e-4)


@given(st.booleans(), st.booleans())
def test_flips_move_boxes_with_their_pixels(upside_down: bool, mirrored: bool) -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[5:15, 10:30] = 255
    boxes = in_shares(np.array([[10, 5, 30, 15]], np.float32), 60, 40)
    turned = flipped(Labelled(image, boxes, np.zeros(1, np.int32)), upside_down=upside_down, mirrored=mirrored)
    left, top, right, bottom = in_pixels(turned.boxes, 60, 40)[0].round().astype(int)
    assert (turned.image[top:bottom, left:right] == 255).all()
    assert turned.image.sum() == image.sum()


def test_colours_go_round_in_hue_and_stop_at_the_ends_of_the_others() -> None:
    image = np.array([[[200, 30, 30], [30, 200, 30], [128, 128, 128]]], np.uint8)
    np.testing.assert_allclose(pictures.recoloured(image, np.ones(3)), image, atol=1)
    assert pictures.recoloured(image, np.array([1.0, 0.0, 1.0]))[0, 0].tolist() == [200, 200, 200]
    assert pictures.recoloured(image, np.array([1.0, 1.0, 9.0])).max(-1).tolist() == [[255, 255, 255]]


def test_batches_do_not_depend_on_threads_and_go_on_where_a_loader_was(small: DetectionSet) -> None:
    batches = TrainingBatches(small, 64, 2, Augmentation(mixup=0.5, degrees=5.0), seed=3)
    one, three = Loader(batches, threads=1), Loader(batches, threads=3, prefetch=5)
    first = [*one, *one]
    for ours, theirs in zip(first, [*three, *three], strict=True):
        assert all((ours[name] == theirs[name]).all() for name in ("images", "boxes", "classes", "valid"))
    later = Loader(TrainingBatches(small, 64, 2, Augmentation(mixup=0.5, degrees=5.0), seed=3, keep=True))
    iterator = iter(one)
    next(iterator)
    later.load_state_dict(one.state_dict())
    assert all((a["images"] == b["images"]).all() for a, b in zip(iterator, later, strict=True))
    with pytest.raises(ConfigError, match=r"saved for other batches: degrees 5.0 \(here 6.0\)"):
        Loader(replace_augmentation(batches, degrees=6.0)).load_state_dict(one.state_dict())


def replace_augmentation(batches: TrainingBatches, **changed: float) -> TrainingBatches:
    changes = replace(batches.augmentation, **changed)
    return TrainingBatches(batches.data, batches.size, batches.batch_size, changes, batches.seed)


def test_batches_have_one_shape_with_room_for_the_fullest_mosaic(small: DetectionSet) -> None:
    batches = TrainingBatches(small, 64, 2)
    assert batches.rows == 4 * small.most_boxes
    assert TrainingBatches(small, 64, 2, Augmentation(mixup=0.1)).rows == 8 * small.most_boxes
    assert TrainingBatches(small, 64, 2, Augmentation(mosaic=0.0)).rows == small.most_boxes
    shapes = {tuple((name, array.shape, str(array.dtype)) for name, array in batches[number].items()) for number in range(6)}
    rows = batches.rows
    assert shapes == {
        (
            ("images", (2, 64, 64, 3), "uint8"),
            ("boxes", (2, rows, 4), "float32"),
            ("classes", (2, rows), "int32"),
            ("valid", (2, rows), "bool"),
        )
    }
    boxes = np.concatenate([batches[number]["boxes"][batches[number]["valid"]] for number in range(6)])
    assert (boxes >= 0).all()
    assert (boxes <= 1).all()


def test_boxes_beyond_the_room_for_them_are_cut_with_a_warning_that_names_the_picture(small: DetectionSet) -> None:
    batches = TrainingBatches(small, 64, 2, most_boxes=1)
    with pytest.warns(RuntimeWarning, match=r"train: the sample of .*\.png has \d+ boxes, of which 1 are used"):
        made = [batches[number] for number in range(3)]
    assert batches.cut > 0
    assert all(batch["valid"].shape == (2, 1) for batch in made)


def test_objects_lie_in_their_boxes_after_all_random_changes(small: DetectionSet) -> None:
    batches = TrainingBatches(small, 64, 2, Augmentation(hsv_h=0.0, hsv_s=0.0, hsv_v=0.0, mixup=0.0), seed=1)
    wanted = np.array([[200, 0, 0], [0, 200, 0]])
    errors = []
    for number in range(9):
        batch = batches[number]
        for image, boxes, classes in zip(batch["images"], batch["boxes"], batch["classes"], strict=True):
            for (x, y, width, height), kind in zip(boxes, classes, strict=True):
                if width * height > 0.01:
                    errors.append(np.abs(image[int(y * 64), int(x * 64)].astype(int) - wanted[kind]).max())
    assert len(errors) > 20
    assert np.mean(np.array(errors) < 30) > 0.8  # another rectangle may lie above


def test_evaluation_batches_are_rectangles_of_like_pictures_and_boxes_find_their_way_back(small: DetectionSet) -> None:
    batches = EvaluationBatches(small, 64, 4)
    assert len(batches) == 2
    seen = []
    for number in range(2):
        batch, placed = batches[number]
        height, width = batch["images"].shape[1:3]
        assert height % 32 == width % 32 == 0
        assert batch["images"].shape[0] == 4
        for row, place in enumerate(placed):
            picture = small.pictures[place.index]
            frame = in_pixels(batch["boxes"][row][batch["valid"][row]], width, height)
            native = in_pixels(picture.labels.boxes, picture.width, picture.height)
            np.testing.assert_allclose(place.in_picture(frame), native, atol=0.05)
            seen.append(place.index)
    assert sorted(seen) == list(range(6))
    assert not batches[1][0]["valid"][len(batches[1][1]) :].any()


@pytest.mark.parametrize(("aspect", "shape"), [((480, 640), (256, 352)), ((640, 480), (352, 256)), ((100, 100), (352, 352))])
def test_frames_have_half_a_stride_of_grey_around(tmp_path: Path, aspect: tuple[int, int], shape: tuple[int, int]) -> None:
    (tmp_path / "a.txt").write_text("0 0.5 0.5 1 1\n")
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((*aspect, 3), np.uint8))
    (tmp_path / "data.yaml").write_text("val: .\nnames: [thing]\n")
    data = read_set(find_description(str(tmp_path / "data.yaml")), "val")
    assert EvaluationBatches(data, 320, 1).shape(0) == shape
    assert EvaluationBatches(data, 320, 1, rectangular=False).shape(0) == (320, 320)


def test_batches_that_cannot_be_made_are_refused(small: DetectionSet) -> None:
    with pytest.raises(DataError, match="train: 6 pictures make no batch of 7"):
        TrainingBatches(small, 64, 7)
    with pytest.raises(ConfigError, match="size: expected a multiple of the network's stride 32, got 100"):
        EvaluationBatches(small, 100, 2)
    with pytest.raises(ConfigError, match="mosaic: expected a number from 0 to 1, got 1.5"):
        Augmentation(mosaic=1.5)


CELLS = """<annotation><size><width>100</width><height>50</height></size>
<object><name>WBC</name><bndbox><xmin>11</xmin><ymin>6</ymin><xmax>31</xmax><ymax>60</ymax></bndbox></object>
<object><name>RBC</name><bndbox><xmin>9</xmin><ymin>9</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"""


def published(folder: Path, pixels: bytes) -> str:
    """The URL of an archive of the blood cells as they are published, one picture of them."""
    files = {"ImageSets/Main/train.txt": b"a\n", "JPEGImages/a.jpg": pixels, "Annotations/a.xml": CELLS.encode()}
    with tarfile.open(folder / "published.tar.gz", "w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(f"BCCD_Dataset-1/BCCD/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return (folder / "published.tar.gz").as_uri()


def test_the_published_blood_cells_become_a_set_if_every_byte_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cache_dir", lambda: tmp_path / "cache")
    right = {"images/train/a.jpg": b"pixels", "labels/train/a.txt": b"1 0.210000 0.560000 0.200000 0.880000\n"}
    with pytest.raises(DataError, match="damaged, or not the published data"):
        blood_cells.download(published(tmp_path, b"pixfls"), blood_cells.digest(right))
    with pytest.raises(UnreachableError, match="could not be downloaded"):
        blood_cells.download((tmp_path / "none.tar.gz").as_uri())
    (tmp_path / "text.tar.gz").write_text("text")
    with pytest.raises(DataError, match="is no archive"):
        blood_cells.download((tmp_path / "text.tar.gz").as_uri())
    assert not (tmp_path / "cache" / "bccd").exists()
    folder = blood_cells.download(published(tmp_path, b"pixels"), blood_cells.digest(right))
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")} == right
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["bccd"]


def test_the_bccd_set_is_found_whole() -> None:
    if not any((folder / "bccd").is_dir() for folder in places.data_dirs()):
        pytest.skip("needs the folder bccd in $TPUFLOW_DATA")
    description = find_description("bccd")
    found = {split: read_set(description, split) for split in ("train", "val", "test")}
    assert {split: (len(one.pictures), one.boxes, len(one.problems)) for split, one in found.items()} == {
        "train": (205, 2804, 0), "val": (87, 1137, 0), "test": (72, 945, 0),
    }  # fmt: skip
