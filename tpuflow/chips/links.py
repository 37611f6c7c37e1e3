"""What joining several chips takes: the closed form of a data-parallel step's sum of gradients.

Chips are joined in up to three levels, each with its own bandwidth: `link_chips` of them by links of their own (a torus of `link_axes`
axes, rings on every axis in both directions at once), `host_chips` by their host, any number by the network. A sum over a level of n
groups is scattered, summed and gathered: it moves 2 (n - 1) / n of the data at that level's bandwidth, and leaves each chip 1 / n of
them for the next. Nominal bandwidths, one hop's latency for every step around the rings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tpuflow.chips.chip import Chip
from tpuflow.errors import ConfigError


def all_reduce_seconds(chip: Chip, data_bytes: float, chips: int) -> float:
    """Seconds to sum `data_bytes` over so many chips, so that each has the sum.

    Raises:
      ConfigError: fewer than one chip, or the chip's row does not say how so many are joined.
    """
    if chips < 1:
        raise ConfigError(f"chips: expected at least 1, got {chips}.")
    seconds, left = 0.0, data_bytes
    for groups, rate, hops in _levels(chip, chips):
        if rate <= 0:
            raise ConfigError(f"chip {chip.name!r} does not say what joins {chips} chips; give its row link_chips and *_bytes_per_second.")
        seconds += 2 * (groups - 1) / groups * left / rate + hops * chip.hop_seconds
        left /= groups
    return seconds


def exposed_seconds(sums: Sequence[tuple[float, float]]) -> float:
    """What sums of gradients add to a step that computes while they are made, one after the other.

    sums: of each, in order, the seconds that it takes and how many seconds before the last gradient its own are ready.
    """
    left, exposed = 0.0, 0.0
    for seconds, ahead in reversed(sums):
        left += seconds
        exposed = max(exposed, left - ahead)
    return exposed


def _levels(chip: Chip, chips: int) -> Iterator[tuple[int, float, int]]:
    """(groups, bytes a second of each chip, steps around the rings) of every level that so many chips need."""
    joined = 1
    rates = ((chip.link_chips, chip.link_bytes_per_second), (chip.host_chips, chip.host_bytes_per_second))
    for most, rate in (*rates, (chips, chip.network_bytes_per_second)):
        reach = min(chips, most)
        if reach > joined:
            groups = math.ceil(reach / joined)
            axes = chip.link_axes if joined == 1 else 1
            yield groups, rate, axes * math.ceil(groups ** (1 / axes))
            joined *= groups
