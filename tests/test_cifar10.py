"""CIFAR-10 is found, checked, and built from JPEGs once; MNIST comes as bytes too."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.examples import data
from train import cifar10

RECORDS = 2


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, no TPUFLOW_DATA, and mirrors that lead into an empty folder."""
    monkeypatch.delenv("TPUFLOW_DATA", raising=False)
    monkeypatch.setattr(places, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(cifar10, "ARCHIVE_URLS", ((tmp_path / "mirror" / "cifar.tar.gz").as_uri(),))
    return tmp_path / "cache"


def _content(name: str) -> bytes:
    """Two records: labels, and planes of one value each."""
    seed = sorted(cifar10.ORIGINAL).index(name)
    records = np.zeros((RECORDS, cifar10.RECORD_BYTES), np.uint8)
    records[:, 0] = [seed, 9 - seed]
    for plane in range(3):
        records[:, 1 + plane * 1024 : 1 + (plane + 1) * 1024] = 10 * seed + plane
    records[1, 1 + 5] = 200  # red, row 0, column 5
    return records.tobytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_binaries(folder: Path, *, is_sorted: bool = False) -> Path:
    for name in cifar10.ORIGINAL:
        path = folder / (("test" if name == "test_batch.bin" else "train") if is_sorted else ".") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_content(name))
    return folder


@pytest.fixture
def small(monkeypatch) -> None:
    """The published files are two records each."""
    monkeypatch.setattr(cifar10, "ORIGINAL", {name: _sha256(_content(name)) for name in cifar10.ORIGINAL})


def _assert_small(images: data.ImageData) -> None:
    pixels, labels = images.train
    assert pixels.shape == (10, 32, 32, 3) and pixels.dtype == np.uint8
    assert labels.dtype == np.int32 and labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert pixels[2, 3, 4].tolist() == [10, 11, 12]
    assert pixels[3, 0, 5].tolist() == [200, 11, 12]
    assert images.test[0].shape == (2, 32, 32, 3) and images.test[1].tolist() == [5, 4]


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar10", "."])
def test_binary_files_are_found_together_or_sorted(cache, small, tmp_path, folder, is_sorted):
    _write_binaries(tmp_path / "here" / folder, is_sorted=is_sorted)
    found = cifar10.load(tmp_path / "here")
    _assert_small(found)
    assert found.origin.endswith("(as published)")


def test_the_environment_comes_before_the_cache(cache, small, tmp_path, monkeypatch):
    _write_binaries(cache / "cifar10")
    assert cifar10.load().origin.startswith(str(cache))
    monkeypatch.setenv("TPUFLOW_DATA", str(_write_binaries(tmp_path / "shared").parent / "shared"))
    assert cifar10.load().origin.startswith(str(tmp_path / "shared"))


def test_a_damaged_file_is_named(cache, small, tmp_path):
    _write_binaries(tmp_path)
    content = bytearray(_content("data_batch_3.bin"))
    content[77] ^= 1
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_3.bin: damaged.*{_sha256(content)}"):
        cifar10.load(tmp_path)


def test_other_pixels_need_their_sums_beside_them(cache, tmp_path):
    _write_binaries(tmp_path)
    with pytest.raises(DataError, match="sha256sum"):
        cifar10.load(tmp_path)
    sums = [f"{_sha256(_content(name))}  {name}\n" for name in cifar10.ORIGINAL]
    (tmp_path / cifar10.SUMS).write_text("".join(sums))
    found = cifar10.load(tmp_path)
    _assert_small(found)
    assert "not the published pixels" in found.origin
    (tmp_path / cifar10.SUMS).write_text("".join(sums[1:]))
    with pytest.raises(DataError, match=r"no sum of data_batch_1\.bin"):
        cifar10.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "0 bytes"), (b"\x01" * 100, "100 bytes"), (b"\x0a" * cifar10.RECORD_BYTES, "label 10")]
)
def test_files_of_another_format_are_refused(cache, tmp_path, content, problem):
    for name in cifar10.ORIGINAL:
        (tmp_path / name).write_bytes(content)
    (tmp_path / cifar10.SUMS).write_text("".join(f"{_sha256(content)} *{name}\n" for name in cifar10.ORIGINAL))
    with pytest.raises(DataError, match=problem):
        cifar10.load(tmp_path)


def test_a_given_folder_without_the_files_is_an_error(cache, small, tmp_path):
    _write_binaries(cache / "cifar10")
    with pytest.raises(DataError, match="no CIFAR-10 here"):
        cifar10.load(tmp_path)


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_a_download_fills_the_cache_once(cache, small, tmp_path, monkeypatch):
    archive = _tar({f"cifar-10-batches-bin/{name}": _content(name) for name in cifar10.ORIGINAL})
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "cifar.tar.gz").write_bytes(archive)
    monkeypatch.setattr(cifar10, "ARCHIVE_SHA256", _sha256(archive))
    _assert_small(cifar10.load())
    (tmp_path / "mirror" / "cifar.tar.gz").unlink()
    _assert_small(cifar10.load())
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == sorted(cifar10.ORIGINAL)


def test_offline_without_data_says_where_to_put_them(cache, small):
    with pytest.raises(DataError, match=r"data_batch_1\.bin.*--data-dir or TPUFLOW_DATA"):
        cifar10.load()


@pytest.fixture
def jpegs(tmp_path, monkeypatch) -> Path:
    """A folder with an archive of flat grey JPEGs and its index, in another order than the records'."""
    rows, members = [], {}
    for name in reversed(list(cifar10.ORIGINAL)):
        records = np.frombuffer(_content(name), np.uint8).reshape(RECORDS, -1)
        for record in range(RECORDS):
            member = f"{name}/{record}.jpg"
            buffer = io.BytesIO()
            Image.new("RGB", (32, 32), (40 * record + int(records[0, 1]),) * 3).save(buffer, "JPEG", quality=95)
            members[member] = buffer.getvalue()
            rows.append((name, record, records[record, 0], member))
    index = io.StringIO()
    csv.writer(index).writerows([("bin_file", "record", "label", "member"), *rows])
    files = {cifar10.JPEG_ARCHIVE: _tar(members), cifar10.JPEG_INDEX: gzip.compress(index.getvalue().encode())}
    (tmp_path / "jpeg" / "cifar10").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / "jpeg" / "cifar10" / name).write_bytes(content)
    monkeypatch.setattr(cifar10, "JPEG_SOURCES", {name: _sha256(content) for name, content in files.items()})
    return tmp_path / "jpeg"


def test_binary_files_are_made_of_jpegs_once(cache, jpegs, monkeypatch):
    first = cifar10.load(jpegs)
    assert first.train[1].tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    middle = first.train[0][:, 16, 16].astype(int)
    np.testing.assert_allclose(middle, np.array([[0, 40, 10, 50, 20, 60, 30, 70, 40, 80]] * 3).T, atol=2)
    assert "not the published pixels" in first.origin
    monkeypatch.setattr(cifar10, "_decode", None)
    np.testing.assert_array_equal(cifar10.load(jpegs).train[0], first.train[0])


def test_binary_files_that_were_damaged_in_the_cache_are_refused(cache, jpegs):
    cifar10.load(jpegs)
    damaged = cache / "cifar10-from-jpeg" / "test_batch.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataError, match=r"test_batch\.bin: damaged"):
        cifar10.load(jpegs)
    damaged.unlink()
    cifar10.load(jpegs)


def test_an_interrupted_build_is_begun_anew(cache, jpegs):
    cifar10.load(jpegs)
    built = cache / "cifar10-from-jpeg"
    (built / cifar10.SUMS).unlink()
    (built / "test_batch.bin").write_bytes(b"half")
    assert len(cifar10.load(jpegs).test[0]) == RECORDS


def test_a_damaged_archive_is_named(cache, jpegs):
    (jpegs / "cifar10" / cifar10.JPEG_ARCHIVE).write_bytes(b"not an archive")
    with pytest.raises(DataError, match=f"{cifar10.JPEG_ARCHIVE}: damaged"):
        cifar10.load(jpegs)


def test_an_archive_that_lacks_an_image_is_refused(jpegs):
    archive, index = ((jpegs / "cifar10" / name).read_bytes() for name in (cifar10.JPEG_ARCHIVE, cifar10.JPEG_INDEX))
    longer = gzip.compress(gzip.decompress(index) + b"test_batch.bin,1,3,absent.jpg\r\n")
    with pytest.raises(DataError, match=r"lacks 1 .*absent\.jpg"):
        cifar10._decode(archive, longer)


@pytest.mark.slow
def test_the_real_images_are_near_the_published_ones():
    """Decoded pixels depend a little on the decoder, so they are not compared by a checksum."""
    try:
        images = cifar10.load()
    except DataError as error:
        pytest.skip(f"CIFAR-10 is not on this machine: {error}")
    assert [part.shape for part in images.train] == [(50000, 32, 32, 3), (50000,)]
    assert images.train[1][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert images.test[1][:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert np.bincount(images.train[1]).tolist() == [5000] * 10 and np.bincount(images.test[1]).tolist() == [1000] * 10
    np.testing.assert_allclose(images.train[0].mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=5e-4)


def test_mnist_comes_as_bytes_as_well():
    numbers, pixels = data.load_embedded(), data.load_embedded(pixels=True)
    assert pixels.train[0].shape == (512, 28, 28, 1) and pixels.train[0].dtype == np.uint8
    for part in ("train", "test"):
        (floats, labels), (whole, same) = getattr(numbers, part), getattr(pixels, part)
        np.testing.assert_array_equal(floats, whole[..., 0].astype(np.float32) / 255)
        np.testing.assert_array_equal(labels, same)
