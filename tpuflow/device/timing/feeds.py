"""What passes between the host and a loop that it feeds: for how long the chip waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.prices import picoseconds
from tpuflow.isa.program import Block, Infeed, Outfeed, Port, Program


@dataclass(frozen=True, slots=True)
class Feed:
    """The bytes that the host sends to a trip of a loop, and those that it takes from it."""

    sent: int
    taken: int

    @property
    def bytes(self) -> int:
        """What goes over the host's link."""
        return self.sent + self.taken

    def seconds(self, machine: Machine) -> float:
        """How long all of it is on its way: on the host's link, and no sooner there than the input pipeline has made it."""
        made = self.sent / rate if (rate := machine.calibration.input_bytes_per_second) else 0.0
        return max(made, self.bytes / machine.chip.host_bytes_per_second)

    def wait(self, machine: Machine, busy: int) -> int:
        """Picoseconds for which a trip waits for its data: they are made and sent while the trip before it is `busy`, also picoseconds;
        what that takes longer, and handing them over, does not."""
        return picoseconds(machine.calibration.step_seconds) + max(0, picoseconds(self.seconds(machine)) - busy)


def feed_of(program: Program, body: Sequence[Block]) -> Feed | None:
    """What passes in each trip of a loop of the Program; None if the host does not feed it."""
    ins, outs = [b for b in body if isinstance(b, Infeed)], [b for b in body if isinstance(b, Outfeed)]
    if not ins and not outs:
        return None
    return Feed(_bytes(program.infeeds[b.port] for b in ins), _bytes(program.outfeeds[b.port] for b in outs))


def _bytes(ports: Iterable[Port]) -> int:
    return sum(math.prod(port.shape) * port.dtype.bytes for port in ports)
