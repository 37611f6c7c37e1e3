"""Rules of random bits, and of keys, which are their words."""

from __future__ import annotations

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.registry import enter, lowers
from tpuflow.lower.operations import random

enter({"threefry2x32": random.threefry2x32, "iota_2x32_shape": random.iota_2x32})


@lowers("random_wrap", "random_unwrap", "to_edtype", "from_edtype", keys=True)
def _same_words(b: Builder, x: Value) -> Value:
    return x
