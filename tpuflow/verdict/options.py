"""Options to improve a step (another policy, sink size, donation, rematerialisation), each with its estimated cost."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.timing.program import sink_time
from tpuflow.device.timing.result import ProgramTime, seconds_text
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import Estimate
from tpuflow.lower.out_of_memory import LARGE_SHARE, size_text
from tpuflow.reports.layers import BACKWARD, FORWARD
from tpuflow.reports.profile import Profile

SINKS = (10, 100, 1000)
"""Steps a round trip that are tried."""
WORTHWHILE = 0.03
"""The least fraction of time or memory that an option must save to be recommended."""
SEEN = 0.01
"""The least relative change of traffic or memory that is mentioned."""

NAMES = {
    "load": "HBM bandwidth",
    "store": "HBM bandwidth",
    "matrix": "matrix unit",
    "vector": "vector unit",
    "scalar": "scalar unit",
    "link": "links",
    "launch": "starting kernels",
}
HOST, FEED = "host launch", "waiting for data"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes: seconds with its share of the host's round trip, HBM bytes moved, HBM bytes held at most."""

    seconds: float
    traffic_bytes: float
    peak_bytes: int

    @classmethod
    def of(cls, e: Estimate) -> Cost:
        """That of an estimate's steps."""
        return cls(e.step_seconds, e.time.work.hbm_bytes / e.steps, e.memory.peak_memory_in_bytes)


@dataclass(frozen=True, slots=True)
class Option:
    """A change to a step, and the step's cost with it; None if it would not fit. `needed_bytes`: the HBM that it would need then, if
    known."""

    what: str
    cost: Cost | None
    note: str = ""
    needed_bytes: int | None = None

    @classmethod
    def tried(cls, what: str, estimated: Callable[[], Estimate], note: str = "") -> Option:
        """The option with the cost that `estimated` finds; without one if the step does not fit."""
        try:
            return cls(what, Cost.of(estimated()), note)
        except OutOfMemoryError as error:
            return cls(what, None, note, error.needed_bytes)

    def helps(self, now: Cost | None) -> bool:
        """Whether it saves time or memory worth the change; anything that fits helps what does not."""
        if self.cost is None or now is None:
            return self.cost is not None
        faster, smaller = _saved(self.cost.seconds, now.seconds), _saved(self.cost.peak_bytes, now.peak_bytes)
        return max(faster, smaller) >= WORTHWHILE and min(faster, smaller) > -WORTHWHILE

    def text(self, now: Cost | None) -> str:
        """One line: what it would be, and against what."""
        if self.cost is None:
            needs = "" if self.needed_bytes is None else f": it needs {size_text(self.needed_bytes)}"
            return f"{self.what}: would not fit{' either' if now is None else ''}{needs}"
        if now is None:
            return f"{self.what}: would fit in {size_text(self.cost.peak_bytes)}, {seconds_text(self.cost.seconds)} a step{self._noted}"
        parts = [f"{seconds_text(now.seconds)} -> {seconds_text(self.cost.seconds)} a step ({_change(self.cost.seconds, now.seconds)})"]
        for name, ours, theirs in (
            ("HBM traffic", now.traffic_bytes, self.cost.traffic_bytes),
            ("memory", now.peak_bytes, self.cost.peak_bytes),
        ):
            if abs(theirs - ours) >= SEEN * ours:
                parts.append(f"{name} {size_text(round(ours))} -> {size_text(round(theirs))} ({_change(theirs, ours)})")
        return f"{self.what}: {', '.join(parts)}{self._noted}"

    @property
    def _noted(self) -> str:
        return f"; {self.note}" if self.note else ""

    def as_dict(self, now: Cost | None) -> dict[str, Any]:
        """Everything as plain data."""
        cost = None if self.cost is None else dataclasses.asdict(self.cost)
        fits = {"fits": cost is not None, "helps": self.helps(now), "needed_bytes": self.needed_bytes}
        return {"what": self.what, **fits, **(cost or {}), "text": self.text(now)}


def _saved(after: float, before: float) -> float:
    """The share that is saved; nothing of nothing."""
    return 1 - after / before if before else 0.0


def _change(after: float, before: float) -> str:
    return f"{-_saved(after, before):+.0%}"


# --- what bounds it ---------------------------------------------------------------------------------------------------


def bounds(time: ProgramTime) -> dict[str, float]:
    """Shares of the whole time by what it waits for, largest first: the busiest queue of each kernel, the host, the data."""
    found = {HOST: time.launch_picoseconds / PICOSECONDS, FEED: time.feed_picoseconds / PICOSECONDS}
    for queue, seconds in time.by_bound().items():
        found[NAMES[queue]] = found.get(NAMES[queue], 0.0) + seconds
    shares = {name: seconds / time.seconds for name, seconds in found.items() if seconds}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


# --- what would help --------------------------------------------------------------------------------------------------


def policy_options(estimated: Callable[[str], Estimate], policies: Iterable[str], now: str) -> Iterator[Option]:
    """The step in other precisions than the one it has."""
    for policy in policies:
        if policy != now:
            yield Option.tried(f"policy {policy}", partial(estimated, policy))


def sink_option(e: Estimate) -> Option | None:
    """The smallest of `SINKS` with which the host's share of the time is negligible, or the largest if none is; None if it is negligible
    now, or for a function that is no training step."""
    if not e.program.infeeds or _host_share(e.time) < WORTHWHILE:
        return None
    longer = [n for n in SINKS if n > e.steps]
    tried = [(n, dataclasses.replace(e, steps=n, time=sink_time(e.program, n, calibration=e.time.calibration))) for n in longer]
    if not tried:
        return None
    steps, found = next((pair for pair in tried if _host_share(pair[1].time) < WORTHWHILE), tried[-1])
    return Option(f"sink_size={steps}", Cost.of(found), f"host's share {_host_share(e.time):.1%} -> {_host_share(found.time):.1%}")


def loop_option(e: Estimate) -> Option | None:
    """Many calls of a function in one round trip, by `tpuflow.sink`; None if the host's share of a call is negligible."""
    if e.program.infeeds or _host_share(e.time) < WORTHWHILE:
        return None
    steps = SINKS[1]
    now = Cost.of(e)
    saved = e.time.launch_picoseconds / PICOSECONDS * (1 - 1 / steps)
    note = f"the host's round trip is {_host_share(e.time):.0%} of a call"
    return Option(f"{steps} calls in one round trip (tpuflow.sink)", dataclasses.replace(now, seconds=now.seconds - saved), note)


def input_option(e: Estimate) -> Option | None:
    """An input pipeline as fast as the host's link; None if the one that is assumed holds up no step by much, or there is none."""
    assumed = e.time.calibration.input_bytes_per_second
    if not e.program.infeeds or not assumed:
        return None
    calibration = dataclasses.replace(e.time.calibration, input_bytes_per_second=0.0)
    found = dataclasses.replace(e, time=sink_time(e.program, e.steps, calibration=calibration))
    if _saved(found.step_seconds, e.step_seconds) < WORTHWHILE:
        return None
    batch = sum(math.prod(port.shape) * port.dtype.bytes for port in e.program.infeeds)
    needed = f"an input pipeline that makes {batch / found.step_seconds / 1e9:.2f} GB/s"
    return Option(needed, Cost.of(found), f"it is assumed to make {assumed / 1e9:.2f}; each batch has {size_text(batch)}")


def _host_share(time: ProgramTime) -> float:
    return time.launch_picoseconds / time.picoseconds if time.picoseconds else 0.0


def donation_option(
    arguments: Mapping[int, Sequence[Any]], results: Sequence[Any], donated: Sequence[int], estimated: Callable[[tuple[int, ...]], Estimate]
) -> Option | None:
    """The function with every argument given away that has an array whose place a result can take; None if there is none.

    `arguments`: the (shape, type) of each array of an argument, by its position; `results`: those of the results. `estimated` takes
    donate_argnums.
    """
    left = Counter(results)
    for position in donated:
        left -= Counter(arguments.get(position, ()))
    found = []
    for position, arrays in arguments.items():
        taken = Counter(arrays) & left
        if position not in donated and taken:
            found.append(position)
            left -= taken
    if not found:
        return None
    numbers = tuple(sorted((*donated, *found)))
    return Option.tried(f"donate_argnums={numbers}", partial(estimated, numbers), "for arguments that are not needed after the call")


def recomputing(profile: Profile) -> str:
    """The advice to use jax.checkpoint, if activations that are kept for the backward pass are a large part of the memory; else ""."""
    memory = profile.memory
    kept = memory.peak_by_category.get("activations", 0)
    if kept < LARGE_SHARE * memory.peak_bytes or not any(k.phase == BACKWARD for k in profile.kernels):
        return ""
    forward = sum(line.seconds.get(FORWARD, 0.0) for line in profile.layers)
    layers: Counter[str] = Counter()
    for a in memory.at_peak():
        if a.category == "activations":
            layers[a.layer or a.name] += a.bytes
    most = ", ".join(f"{name} {size_text(size)}" for name, size in layers.most_common(3))
    return (
        f"jax.checkpoint (nn.remat): {size_text(kept)} of the {size_text(memory.peak_bytes)} live at the peak are activations "
        f"kept for the backward pass (most: {most}); it can save no more than these, and computing all of them again takes "
        f"{seconds_text(forward)} a step"
    )
