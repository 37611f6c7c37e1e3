"""Pictures a second that detection's loader makes for training, four put together and changed at random, from the blood cells' JPEGs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from bench.timing import publish
from train.detection.batches import TrainingBatches
from train.detection.dataset import DetectionSet, read_set
from train.detection.description import find_description
from train.pipeline import Loader

SIZES, BATCH, BATCHES = (320, 640), 8, 24
THREADS = (1, 2)


def rate(data: DetectionSet, size: int, threads: int, *, keep: bool) -> float:
    """Pictures a second over some batches, after one that starts the threads; with `keep`, all pictures are decoded before."""
    batches = TrainingBatches(data, size, BATCH, keep=keep)
    if keep:
        for index in range(len(data.pictures)):
            batches.pictures.image(index)
    iterator = iter(Loader(batches, threads=threads))
    next(iterator)
    started = time.perf_counter()
    made = sum(len(batch["images"]) for batch in islice(iterator, BATCHES))
    return made / (time.perf_counter() - started)


def run() -> tuple[str, Mapping[str, Any]]:
    """A row for each size, number of threads, and whether decoded pictures are kept."""
    data = read_set(find_description("bccd"), "train")
    rows = [
        {"size": size, "threads": threads, "kept": keep, "pictures_a_second": rate(data, size, threads, keep=keep)}
        for size in SIZES for keep in (False, True) for threads in THREADS
    ]  # fmt: skip
    lines = [f"{'size':>5} {'threads':>8} {'decoded':>12} {'pictures/s':>11}"]
    for row in rows:
        when = "once" if row["kept"] else "each time"
        lines.append(f"{row['size']:5} {row['threads']:8} {when:>12} {row['pictures_a_second']:11.1f}")
    return "\n".join(lines), {"rows": rows}


if __name__ == "__main__":
    publish(__doc__, run)
