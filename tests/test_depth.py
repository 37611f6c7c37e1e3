"""Estimating ten times the depth costs at most twelve times as much (`python -m bench.depth` has more networks)."""

from __future__ import annotations

import pytest

from bench.depth import LIMIT, NETWORKS, measure


@pytest.mark.parametrize(("name", "limit"), [("mlp", LIMIT), ("transformer, scan", 2.0)])
def test_ten_times_the_depth_costs_at_most_twelve_times_as_much(name: str, limit: float):
    make, layers = NETWORKS[name]
    few, many = measure(make, layers, rounds=2)
    assert many < limit * few, f"{few:.2f} and {many:.2f} seconds"
