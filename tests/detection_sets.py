"""A small data set of pictures with coloured rectangles, written as users have theirs."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

NAMES = ("red", "green")
COLOURS = ((0, 0, 200), (0, 200, 0))  # OpenCV's order: blue, green, red


def write_set(root: Path, pictures: int = 6, *, splits: tuple[str, ...] = ("train", "val"), seed: int = 0) -> Path:
    """images/SPLIT/N.png, labels/SPLIT/N.txt and data.yaml, whose path is returned; sizes and boxes are drawn from the seed."""
    rng = np.random.default_rng(seed)
    for split in splits:
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for number in range(pictures):
            height, width = rng.integers(40, 90, 2)
            image = rng.integers(90, 140, (height, width, 3), np.uint8)
            lines = [_rectangle(image, rng) for _ in range(rng.integers(1, 4))]
            cv2.imwrite(str(root / "images" / split / f"{number}.png"), image)
            (root / "labels" / split / f"{number}.txt").write_text("".join(lines))
    file = root / "data.yaml"
    file.write_text("".join(f"{split}: images/{split}\n" for split in splits) + f"nc: {len(NAMES)}\nnames: [{', '.join(NAMES)}]\n")
    return file


def _rectangle(image: np.ndarray, rng: np.random.Generator) -> str:
    height, width = image.shape[:2]
    kind, high, wide = int(rng.integers(2)), int(rng.integers(10, 30)), int(rng.integers(10, 30))
    top, left = int(rng.integers(height - high)), int(rng.integers(width - wide))
    image[top : top + high, left : left + wide] = COLOURS[kind]
    return f"{kind} {(left + wide / 2) / width:.6f} {(top + high / 2) / height:.6f} {wide / width:.6f} {high / height:.6f}\n"
