"""What infeed and outfeed refuse: a port that runs dry, and more items sent than there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.errors import LaunchError
from tpuflow.isa.program import Port


def run_dry(ports: Sequence[Port], items: Sequence[int]) -> LaunchError:
    """The error of a program that takes more items than the ports were given."""
    given = ", ".join(f"{p.name!r} {n}" for p, n in zip(ports, items, strict=True))
    return LaunchError(f"an infeed has run dry: the program takes more items than the ports were given ({given}); give them more.")


def check_sent(ports: Sequence[Port], sent: Sequence[int], room: int) -> None:
    """Refuse what was lost for want of room.

    Raises:
      LaunchError: with both numbers.
    """
    for port, n in zip(ports, sent, strict=True):
        if n > room:
            raise LaunchError(f"outfeed {port.name!r}: the program sent {n} items, with room for {room}; say how many with `count`.")
