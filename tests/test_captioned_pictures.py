"""Folders of pictures with captions: which they are, what is cut out of them, and what is said of folders that are not right."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tpuflow.errors import DataError
from train.diffusion.captioned import OpenPictures, read_folder
from train.pipeline import Batches, Loader

SIZES = ((40, 30), (17, 31), (24, 24))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures of noise, of which one is in a folder below, and captions."""
    rng = np.random.default_rng(0)
    (tmp_path / "more").mkdir()
    rows = []
    for number, (width, height) in enumerate(SIZES):
        name = f"{'more/' if number == 2 else ''}{number}.png"
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(tmp_path / name)
        rows.append({"file_name": name, "text": f"picture {number}"})
    write(tmp_path, rows)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_pictures_and_captions_are_read_in_the_files_order(folder: Path) -> None:
    found = read_folder(folder)
    assert found.files == tuple(folder / name for name in ("0.png", "1.png", "more/2.png"))
    assert found.captions == (("picture 0",), ("picture 1",), ("picture 2",))


def test_columns_may_have_other_names_and_captions_be_several(folder: Path) -> None:
    write(folder, [{"path": "0.png", "words": ["one", "two"]}])
    found = read_folder(folder, "path", "words")
    assert found.files == (folder / "0.png",) and found.captions == (("one", "two"),)


def test_a_table_in_csv_serves_as_well(folder: Path) -> None:
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text('file_name,text\n1.png,"a cat, and a dog"\n')
    assert read_folder(folder).captions == (("a cat, and a dog",),)


@pytest.mark.torch
def test_squares_are_those_of_torchvision(folder: Path, transformers: ModuleType) -> None:
    from torchvision import transforms

    whole = transforms.Compose(
        [
            transforms.Resize(20, interpolation=transforms.InterpolationMode.LANCZOS), transforms.CenterCrop(20),
            transforms.ToTensor(), transforms.Normalize([0.5], [0.5]),
        ]
    )  # fmt: skip
    files = read_folder(folder).files
    found = OpenPictures(files, 20, center_crop=True)(np.arange(3), np.random.default_rng(0))
    for file, square in zip(files, found, strict=True):
        with Image.open(file) as picture:
            expected = whole(picture.convert("RGB")).numpy().transpose(1, 2, 0)
        np.testing.assert_allclose(square, expected, rtol=0, atol=1e-6)


def test_squares_are_drawn_and_mirrored_by_seed_and_place(folder: Path) -> None:
    files = read_folder(folder).files
    transforms = (OpenPictures(files, 16, random_flip=True),)
    batches = Batches(np.arange(3), np.arange(3), 3, transforms, shuffle=True, seed=1)
    first = [batches[number][0] for number in range(8)]
    np.testing.assert_array_equal(first[5], batches[5][0])
    assert first[0].shape == (3, 16, 16, 3) and first[0].dtype == np.float32
    assert -1 <= min(one.min() for one in first) < max(one.max() for one in first) <= 1
    squares = {one.tobytes() for batch in first for one, number in zip(*batches_at(batches, batch), strict=True) if number == 2}
    assert len(squares) == 2, "a square picture has one place, and is mirrored or not"
    assert len(list(Loader(batches))) == 1


def batches_at(batches: Batches, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A batch's pictures and their numbers."""
    number = next(number for number in range(8) if np.array_equal(batches[number][0], pictures))
    return pictures, batches[number][1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "no captions .it holds: 0.png, 1.png, more.; expected metadata.jsonl or metadata.csv with the columns 'file_name'"),
        ([], "no rows; expected one for each picture"),
        ([{"file_name": "0.png", "txt": "a"}], "metadata.jsonl:1: no column 'text', there are file_name, txt. Did you mean 'txt'"),
        ([{"file_name": "0.png", "text": 3}], "metadata.jsonl:1: the caption is 3, expected a text"),
        ([{"file_name": "0.png", "text": "a"}, {"file_name": "9.png", "text": "b"}], "1 of 2 pictures cannot be opened: .*9.png .missing."),
    ],
)
def test_a_folder_that_is_not_right_says_what_is_wrong(folder: Path, rows: list[dict[str, Any]] | None, message: str) -> None:
    (folder / "metadata.jsonl").unlink() if rows is None else write(folder, rows)
    with pytest.raises(DataError, match=message):
        read_folder(folder)


def test_lines_that_are_no_json_say_where(folder: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "a"}\n{"file_name\n')
    with pytest.raises(DataError, match="metadata.jsonl:2: no JSON"):
        read_folder(folder)


def test_a_damaged_picture_is_named_at_its_beginning_or_when_it_is_read(folder: Path) -> None:
    (folder / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="1 of 3 pictures cannot be opened: .*0.png"):
        read_folder(folder)
    whole = (folder / "1.png").read_bytes()
    (folder / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="1.png: the picture is damaged"):
        OpenPictures((folder / "1.png",), 16)(np.arange(1), np.random.default_rng(0))
