"""The data set is found, checked, downloaded whole or not at all, and replaced by the embedded one only loudly."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from models.mlp import MLP, TORCH_LAYERS
from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.examples import data, download
from tpuflow.importers import flax_params

BATCH = 64


@pytest.fixture
def nothing_on_disk(tmp_path, monkeypatch):
    """No TPUFLOW_DATA, an empty cache, and mirrors that lead into an empty folder."""
    monkeypatch.delenv("TPUFLOW_DATA", raising=False)
    monkeypatch.setattr(places, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(data, "SOURCES", {name: _with_mirrors(name, tmp_path / "mirror") for name in data.SOURCES})
    return tmp_path


def _with_mirrors(name: str, folder: Path) -> data.Source:
    source = data.SOURCES[name]
    return data.Source(source.folders, (f"{folder.as_uri()}/",), source.sha256)


def _copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    for file in target.iterdir():
        file.chmod(0o644)
    return target


@pytest.mark.slow
def test_images_are_bytes_over_255_in_float32_and_labels_int32(fashion_mnist, data_dir):
    images, labels = fashion_mnist.train
    assert images.shape == (60000, 28, 28) and images.dtype == np.float32
    assert labels.shape == (60000,) and labels.dtype == np.int32
    assert [part.shape for part in fashion_mnist.test] == [(10000, 28, 28), (10000,)]
    raw = np.frombuffer(gzip.decompress((data_dir / data.TRAIN_IMAGES).read_bytes()), np.uint8, offset=16)
    np.testing.assert_array_equal(images.reshape(-1), raw.astype(np.float32) / 255)
    assert labels[:5].tolist() == [9, 0, 0, 3, 0]


@pytest.mark.slow
def test_the_documented_fp32_losses_follow_from_the_exported_weights(fashion_mnist, torch_seed0, documented):
    images, labels = fashion_mnist.train
    model = MLP()
    like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 28, 28)))
    params = flax_params(torch_seed0, like, TORCH_LAYERS)

    def loss_of(variables, x, y):
        return -jax.nn.log_softmax(model.apply(variables, x))[jnp.arange(BATCH), y].mean()

    def step(variables, batch):
        loss, gradients = jax.value_and_grad(loss_of)(variables, *batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, variables, gradients), loss

    steps = 901
    batches = images[: steps * BATCH].reshape(steps, BATCH, 28, 28), labels[: steps * BATCH].reshape(steps, BATCH)
    _, losses = jax.jit(lambda p, b: jax.lax.scan(step, p, b))(jax.tree.map(jnp.asarray, params), batches)
    np.testing.assert_allclose(losses[::100], documented["runs"]["fp32"]["epoch1_losses"], rtol=0, atol=5e-6)


def test_mnist_is_found_beside_fashion_mnist(fashion_mnist, data_dir):
    if data.find("mnist") is None:
        pytest.skip("MNIST itself is not on this machine: set TPUFLOW_DATA, or train LeNet once to download it")
    digits = data.load("mnist", embedded=False)
    assert digits.train[1][:5].tolist() == [5, 0, 4, 1, 9] and digits.test[1][:4].tolist() == [7, 2, 1, 0]


def test_a_damaged_file_is_named_with_both_checksums(data_dir, tmp_path):
    folder = _copy(data_dir, tmp_path / "fashion-mnist")
    damaged = folder / data.TEST_LABELS
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DataError) as caught:
        data.load("fashion-mnist", tmp_path)
    for expected in (
        str(damaged),
        "damaged",
        hashlib.sha256(content).hexdigest(),
        *data.SOURCES["fashion-mnist"].sha256[data.TEST_LABELS],
        "Delete",
    ):
        assert expected in str(caught.value)


def test_a_truncated_file_is_refused(data_dir, tmp_path):
    folder = _copy(data_dir, tmp_path / "fashion-mnist")
    content = (folder / data.TEST_IMAGES).read_bytes()
    (folder / data.TEST_IMAGES).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged"):
        data.load("fashion-mnist", tmp_path)


def test_a_given_folder_without_the_files_is_an_error_and_not_a_reason_to_look_elsewhere(tmp_path):
    with pytest.raises(DataError, match=data.TRAIN_IMAGES):
        data.load("fashion-mnist", tmp_path)


def test_an_unknown_data_set_lists_the_known_ones():
    with pytest.raises(DataError, match="fashion-mnist, mnist"):
        data.load("cifar")


def test_the_environment_comes_before_the_cache(data_dir, nothing_on_disk, monkeypatch):
    _copy(data_dir, nothing_on_disk / "cache" / "fashion-mnist")
    assert data.find("fashion-mnist") == nothing_on_disk / "cache" / "fashion-mnist"
    monkeypatch.setenv("TPUFLOW_DATA", str(data_dir))
    assert data.find("fashion-mnist") == data_dir


def test_a_download_fills_the_cache_once(data_dir, nothing_on_disk):
    _copy(data_dir, nothing_on_disk / "mirror")
    first = data.load("fashion-mnist", embedded=False)
    shutil.rmtree(nothing_on_disk / "mirror")
    again = data.load("fashion-mnist", embedded=False)
    assert first.origin == again.origin == str(nothing_on_disk / "cache" / "fashion-mnist")


def test_a_wrong_download_leaves_nothing_behind(nothing_on_disk):
    mirror = nothing_on_disk / "mirror"
    mirror.mkdir()
    for file in data.SOURCES["fashion-mnist"].sha256:
        (mirror / file).write_bytes(b"<html>please log in</html>")
    with pytest.raises(DataError, match="could not be downloaded.*sha256"):
        data.load("fashion-mnist")
    assert list((nothing_on_disk / "cache" / "fashion-mnist").iterdir()) == []


def test_a_second_mirror_is_tried(nothing_on_disk):
    good = nothing_on_disk / "good"
    good.write_bytes(b"content")
    target = nothing_on_disk / "cache" / "file"
    download.fetch([(nothing_on_disk / "absent").as_uri(), good.as_uri()], target, [hashlib.sha256(b"content").hexdigest()])
    assert target.read_bytes() == b"content"


def test_offline_without_data_the_embedded_images_are_used_and_said_so(nothing_on_disk, capsys):
    images = data.load("fashion-mnist")
    assert images.train[0].shape == (512, 28, 28) and images.test[1].shape == (256,)
    notice = capsys.readouterr().err
    assert "NO FASHION-MNIST" in notice and "512 embedded images" in notice and "TPUFLOW_DATA" in notice


def test_offline_without_data_parity_is_refused(nothing_on_disk):
    with pytest.raises(DataError, match="--data-dir or TPUFLOW_DATA"):
        data.load("fashion-mnist", embedded=False)


def test_offline_mnist_is_not_replaced_by_clothes(nothing_on_disk):
    with pytest.raises(DataError, match="mnist"):
        data.load("mnist")


def test_the_embedded_images_are_the_first_of_the_published_ones(fashion_mnist):
    small = data.load_embedded()
    for part in ("train", "test"):
        for ours, whole in zip(getattr(small, part), getattr(fashion_mnist, part), strict=True):
            np.testing.assert_array_equal(ours, whole[: len(ours)])
    assert data.EMBEDDED.stat().st_size < 400_000
