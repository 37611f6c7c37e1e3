"""Fingerprints of a training's settings and data, which must be equal when it resumes from a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tpuflow.data.feeding import ArrayFeed
from tpuflow.training.preparing import Job
from tpuflow.training.train_step import Recipe

HASHED_BYTES = 256 * 2**20
"""Larger arrays are told apart by so many bytes of evenly spaced samples; hashing them takes about 0.2 s."""


def fingerprint(job: Job) -> dict[str, Any]:
    """The settings and the data that must be equal to resume. `epochs`, `sink_size`, chip and engine may differ, and are not part of it."""
    settings = job.settings
    return {
        "model": job.recipe.name,
        "policy": settings["policy"],
        "loss scale": str(job.recipe.policy.loss_scale) if isinstance(job.recipe, Recipe) else "none",
        "batch normalisation": settings["norm_dtype"],
        "loss": settings["loss"],
        "batch_size": settings["batch_size"],
        **job.config.same(),
        "data": data_fingerprint(job),
    }


def data_fingerprint(job: Job) -> str:
    """Shapes, types and SHA-256 of arrays; of other data, shape and type of the first batch (what follows is not known)."""
    if isinstance(job.feed, ArrayFeed):
        return ", ".join(_array(leaf) for leaf in job.feed.leaves)
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in job.signature)


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The entries in which two fingerprints differ, in words."""
    return [f"{name} was {saved.get(name)!r}, here {value!r}" for name, value in here.items() if saved.get(name) != value]


def layout_differences(saved: Iterable[tuple[str, Any]], here: Iterable[tuple[str, Any]]) -> list[str]:
    """Arrays that are missing, unknown, or of another shape or type, in words."""
    old, new = ({name: f"{np.dtype(a.dtype)}{list(a.shape)}" for name, a in leaves} for leaves in (saved, here))
    lines = [f"{name} {text} is not in the checkpoint" for name, text in new.items() if name not in old]
    lines += [f"{name} {text} is only in the checkpoint" for name, text in old.items() if name not in new]
    return lines + [f"{name} was {old[name]}, here {text}" for name, text in new.items() if name in old and old[name] != text]


def _array(leaf: np.ndarray) -> str:
    stride = -(-leaf.nbytes // HASHED_BYTES)
    content = hashlib.sha256(np.ascontiguousarray(leaf[::stride]).view(np.uint8).data).hexdigest()
    return f"{leaf.dtype}{list(leaf.shape)} {content[:16]}"
