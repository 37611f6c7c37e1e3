"""Shardings over a mesh of two axes, for tests of partitioned programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tests.cases import words
from tests.tolerances import sum_bound
from tpuflow.device.runtime import Executable

P = PartitionSpec
RNG = np.random.default_rng(0)
SIZES = {"data": 2, "model": 4}
MESH = AbstractMesh((2, 4), ("data", "model"))
CLOSE = {"rtol": sum_bound(128), "atol": sum_bound(128)}


def mesh_of(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh of no devices."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def cut(*entries: Any, mesh: AbstractMesh = MESH) -> NamedSharding:
    """A sharding of an array over the mesh."""
    return NamedSharding(mesh, P(*entries))


def kept(x: Any, *entries: Any, mesh: AbstractMesh = MESH) -> Any:
    """x, which lies so."""
    return lax.with_sharding_constraint(x, cut(*entries, mesh=mesh))


def floats(*shape: int) -> np.ndarray:
    """Small ones, drawn anew."""
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def kinds(compiled: Any) -> Counter[str]:
    """How many collectives of each kind a call makes, as its time says."""
    return Counter(row.kind for row in compiled.time().collectives for _ in range(row.count))


def both_engines(program: Any, arguments: Any) -> list[np.ndarray]:
    """What the fast engine gives, which the reference engine gives bit for bit."""
    leaves = [words(x) for x in jax.tree.leaves(arguments)]
    reference, exact = (Executable(program, *engine).launch(leaves)[0] for engine in (("reference",), ("fast", "bitexact")))
    for one, other in zip(reference, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    return [np.asarray(x) for x in exact]
