"""Image transforms give what the libraries they stand for give, and the same for the same seed."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tpuflow.errors import ConfigError
from train import transforms
from train.transforms import Normalize, RandomCrop, RandomHorizontalFlip, Rescale, Resize, ToFloat

OPENCV = {
    (28, 28, 1, 32, 32): "d3665ecda7bba728",
    (32, 32, 3, 224, 224): "c9cc0fbdcb14107a",
    (40, 30, 3, 17, 19): "a06c32d0f5d8ce64",
    (5, 7, 4, 13, 3): "d3550fb3e14c708e",
    (64, 64, 3, 32, 32): "3848678d1501df48",
}
"""(height, width, channels, new height, new width) -> sha256 of cv2.resize(INTER_LINEAR) of `_bytes`; OpenCV 4.5.5 and 5.0.0 agree."""


def _stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _bytes(*shape: int) -> np.ndarray:
    n = np.arange(np.prod(shape), dtype=np.uint32)
    return ((n * n * 31 + n * 7) % 251).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize("sizes", OPENCV, ids=str)
def test_resizing_is_opencvs_bit_for_bit(sizes):
    height, width, channels, new_height, new_width = sizes
    resized = Resize(new_height, new_width)(_bytes(2, height, width, channels))
    assert resized.shape == (2, new_height, new_width, channels)
    assert hashlib.sha256(resized.tobytes()).hexdigest().startswith(OPENCV[sizes])


def test_resizing_has_pixel_centres_at_half_numbers():
    corner = np.array([[0, 100], [200, 255]], np.uint8).reshape(1, 2, 2, 1)
    expected = [[0, 25, 75, 100], [50, 72, 117, 139], [150, 167, 200, 216], [200, 214, 241, 255]]  # cv2.resize's
    assert Resize(4, 4)(corner)[0, :, :, 0].tolist() == expected


def test_resizing_keeps_flat_images_and_the_right_size():
    flat = np.full((1, 9, 5, 2), 77, np.uint8)
    assert np.all(Resize(31, 4)(flat) == 77)
    assert Resize(9, 5)(flat) is flat


def test_resizing_numbers_that_are_no_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"uint8 images.*float32\[1, 4, 4, 1\]"):
        Resize(8, 8)(np.zeros((1, 4, 4, 1), np.float32))


def test_a_random_crop_is_a_window_of_the_padded_image():
    images = _bytes(40, 6, 7, 3) % 250 + 1  # no zeros, so that the padding shows
    cropped = RandomCrop(5, 7, padding=2)(images, _stream())
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = []
    for image, around in zip(cropped, padded, strict=True):
        windows = {(y, x): around[y : y + 5, x : x + 7] for y in range(6) for x in range(5)}
        places.append(next(place for place, window in windows.items() if np.array_equal(window, image)))
    assert {y for y, _ in places} == set(range(6)) and {x for _, x in places} == set(range(5))


def test_a_crop_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="9x4 does not fit into 8x8"):
        RandomCrop(9, 4, padding=2)(_bytes(1, 4, 4, 1), _stream())


def test_a_random_flip_mirrors_some_images_whole():
    images = _bytes(200, 3, 4, 3)
    flipped = RandomHorizontalFlip(0.25)(images, _stream())
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, images, strict=True)]
    kept = [np.array_equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 30 < sum(mirrored) < 70
    np.testing.assert_array_equal(RandomHorizontalFlip(1.0)(images, _stream()), images[:, :, ::-1])
    np.testing.assert_array_equal(RandomHorizontalFlip(0.0)(images, _stream()), images)


@pytest.mark.parametrize("transform", [RandomCrop(6, 6, padding=3), RandomHorizontalFlip()], ids=str)
def test_random_transforms_follow_their_stream(transform):
    images = _bytes(16, 6, 6, 3)
    np.testing.assert_array_equal(transform(images, _stream(1)), transform(images, _stream(1)))
    assert not np.array_equal(transform(images, _stream(1)), transform(images, _stream(2)))


def test_rescaling_and_normalising_are_float32_arithmetic():
    images = _bytes(1, 4, 4, 3)
    exact = images.astype(np.float64)
    np.testing.assert_array_equal(ToFloat()(images), (exact / 255).astype(np.float32))
    np.testing.assert_allclose(Rescale(1 / 0.3081, -0.1307 / 0.3081)(images), (exact - 0.1307) / 0.3081, rtol=1e-6, atol=1e-6)
    normal = Normalize((0.1, 0.2, 0.3), (0.5, 0.25, 2.0))(ToFloat()(images))
    np.testing.assert_allclose(normal, (exact / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 2.0], rtol=1e-6, atol=1e-6)
    assert normal.dtype == np.float32


def test_as_many_means_as_channels_are_needed():
    with pytest.raises(ConfigError, match="2 means and 2 deviations for 3 channels"):
        Normalize((0.5, 0.5), (1.0, 1.0))(_bytes(1, 2, 2, 3))


@pytest.mark.parametrize(
    ("row", "shape", "result"),
    [
        (transforms.LENET, (2, 28, 28, 1), (2, 32, 32, 1)),
        (transforms.TUTORIAL, (2, 32, 32, 3), (2, 32, 32, 3)),
        (transforms.resnet_training(40), (2, 32, 32, 3), (2, 40, 40, 3)),
        (transforms.resnet_evaluation(), (1, 32, 32, 3), (1, 224, 224, 3)),
    ],
    ids=["lenet", "tutorial", "resnet_training", "resnet_evaluation"],
)
def test_the_documented_rows_make_float32_images_and_change_nothing_given(row, shape, result):
    images = _bytes(*shape)
    before = images.copy()
    made = transforms.apply(row, images, _stream())
    assert made.dtype == np.float32 and made.shape == result
    np.testing.assert_array_equal(images, before)
