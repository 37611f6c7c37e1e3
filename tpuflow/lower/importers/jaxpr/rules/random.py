"""Rules of random bits, and of keys, which are their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.registry import enter, lowers
from tpuflow.lower.operations import random

enter({"threefry2x32": random.threefry2x32, "iota_2x32_shape": random.iota_2x32})


@lowers("rng_bit_generator")
def _rng_bit_generator(b: Builder, state: Value, *, shape: Sequence[int], dtype: Any, algorithm: Any) -> tuple[Value, Value]:
    drawn = random.threefry_bits if algorithm.name == "RNG_THREE_FRY" else random.rng_bits
    return drawn(b, state, shape, dtype_of(dtype))


@lowers("random_wrap", "random_unwrap", "to_edtype", "from_edtype", keys=True)
def _same_words(b: Builder, x: Value) -> Value:
    return x
