"""`Profile`: the modelled cost of a step in tables by layer, kernel and queue, as text and as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow import __version__
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.timing.result import KernelRow, ProgramTime, seconds_text
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.program import Program
from tpuflow.reports.files import PlainData
from tpuflow.reports.layers import BACKWARD, FORWARD, PHASES, UPDATE, Layer, layer_of
from tpuflow.reports.memory import MemoryMap, memory_map

OUTSIDE = "(outside modules)"
SHOWN = 20


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One kernel, with all its executions in a step: where it belongs, its time, what bounds it, and its work.

    `count`: executions in a step, a fraction for a kernel that runs once in a launch of many steps. Seconds, macs and bytes are sums over
    them; `share` is of the device's time. `busy_seconds`: seconds that each queue works, with the time between kernels as "launch".
    `hbm_bytes`, `resident_bytes`: bytes moved to and from HBM, and to and from arrays that stay on the chip. `vmem_bytes`: the size of its
    tiles.
    """

    place: str
    layer: str
    phase: str
    what: str
    source: str
    count: float
    seconds: float
    share: float
    bound: str
    cores: int
    macs: float
    hbm_bytes: float
    resident_bytes: float
    vmem_bytes: int
    flops_per_second: float
    intensity: float
    busy_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LayerLine:
    """One module path in one step: seconds in each phase, kernels executed, work."""

    layer: str
    seconds: Mapping[str, float]
    share: float
    kernels: float
    macs: float
    hbm_bytes: float

    @property
    def total_seconds(self) -> float:
        """All phases."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class QueueLine:
    """One queue of the busiest core: seconds of a step that it works, and their share of the device's time."""

    queue: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Profile(PlainData):
    """The modelled cost of a step: tables of `layers` and `kernels` (longest first) and of `queues`; `str` prints all three.

    All figures are of one step, except `time`, which is of a whole launch of `steps` steps. Times are modelled (`time.provenance`); nothing
    was run. `settings`: policy, batch size and optimizer as text, where they are known.
    """

    name: str
    program: Program
    time: ProgramTime
    memory: MemoryMap
    steps: int
    layers: tuple[LayerLine, ...]
    kernels: tuple[KernelLine, ...]
    queues: tuple[QueueLine, ...]
    settings: Mapping[str, str]

    @property
    def title(self) -> str:
        """The step, its precision and the chip."""
        policy = self.settings.get("policy")
        return f"{self.name} on {self.time.chip.name}{f' in {policy}' if policy else ''}"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, most: int = SHOWN) -> str:
        """The three tables, with at most so many layers and kernels."""
        parts = [self.time.summary(self.steps), "", *_layer_table(self.layers, most), "", *_kernel_table(self.kernels, most), ""]
        return "\n".join([*parts, *_queue_table(self.queues), "", str(self.memory)])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data: numbers in seconds, bytes and operations, of one step but for `round_trip`."""
        t, chip = self.time, self.time.chip
        return {
            "name": self.name,
            "chip": chip.name,
            "fit": t.calibration.fit,
            "settings": dict(self.settings),
            "version": __version__,
            "steps": self.steps,
            "seconds": t.seconds / self.steps,
            "device_seconds": t.device_seconds / self.steps,
            "host_seconds": t.launch_picoseconds / PICOSECONDS / self.steps,
            "feed_seconds": t.feed_picoseconds / PICOSECONDS / self.steps,
            "mfu": t.mfu,
            "round_trip": {"seconds": t.seconds, "kernels": sum(r.count for r in t.kernels), "hbm_bytes": t.work.hbm_bytes},
            "peak_flops": {name: chip.peak_flops(name) for name in sorted(t.work.macs)},
            "hbm_bytes_per_second": chip.hbm_bytes_per_second,
            "launch_seconds": chip.launch_seconds,
            "kernel_seconds": t.calibration.kernel_seconds,
            "layers": [_plain(line) for line in self.layers],
            "kernels": [_plain(line) for line in self.kernels],
            "queues": [_plain(line) for line in self.queues],
            "memory": self.memory.as_dict(),
        }


def profile(program: Program, time: ProgramTime, *, name: str = "", steps: int = 1, settings: Mapping[str, str] | None = None) -> Profile:
    """The profile of a Program. time: the modelled time of a launch of `steps` steps. settings: as in `Profile`."""
    memory = memory_map(program)
    vmem = {k.place: k.vmem_bytes for k in memory.kernels}
    trains = any(layer_of(r.time.scope).phase == BACKWARD for r in time.kernels)
    kernels = sorted(
        (_kernel_line(r, time, vmem[r.place], steps, trains=trains) for r in time.kernels), key=lambda k: (-k.seconds, k.place)
    )
    return Profile(
        name=name or program.name,
        program=program,
        time=time,
        memory=memory,
        steps=steps,
        layers=_layer_lines(kernels, time.device_seconds / steps),
        kernels=tuple(kernels),
        queues=tuple(QueueLine(q, s / steps, _share(s, time.device_seconds)) for q, s in time.busy_seconds.items()),
        settings={what: text for what, text in (settings or {}).items() if text},
    )


def place_in(scope: str, *, trains: bool) -> Layer:
    """The layer of a kernel by its scope; in a Program without a backward pass everything is forward."""
    layer = layer_of(scope)
    return layer if trains or layer.phase != UPDATE else Layer(layer.path, FORWARD)


def _kernel_line(row: KernelRow, time: ProgramTime, vmem_bytes: int, steps: int, *, trains: bool) -> KernelLine:
    t, layer, count = row.time, place_in(row.time.scope, trains=trains), row.count / steps
    queues = {**dict(zip(QUEUES, t.busy_picoseconds, strict=True)), "launch": t.floor_picoseconds}
    seconds, moved, flops = count * t.seconds, count * t.work.hbm_bytes, count * t.work.flops
    return KernelLine(
        place=row.place,
        layer=layer.path or OUTSIDE,
        phase=layer.phase,
        what=t.name,
        source=t.source,
        count=count,
        seconds=seconds,
        share=_share(seconds, time.device_seconds / steps),
        bound=t.bound,
        cores=t.cores,
        macs=count * sum(t.work.macs.values()),
        hbm_bytes=moved,
        resident_bytes=count * t.work.resident_bytes,
        vmem_bytes=vmem_bytes,
        flops_per_second=flops / seconds if seconds else 0.0,
        intensity=flops / moved if moved else 0.0,
        busy_seconds={name: count * busy / PICOSECONDS for name, busy in queues.items() if busy},
    )


def _layer_lines(kernels: Iterable[KernelLine], whole_seconds: float) -> tuple[LayerLine, ...]:
    groups: dict[str, list[KernelLine]] = {}
    for line in kernels:
        groups.setdefault(line.layer, []).append(line)
    return tuple(sorted((_layer_line(name, lines, whole_seconds) for name, lines in groups.items()), key=lambda x: -x.total_seconds))


def _layer_line(name: str, lines: Sequence[KernelLine], whole_seconds: float) -> LayerLine:
    seconds = {phase: sum(k.seconds for k in lines if k.phase == phase) for phase in PHASES}
    return LayerLine(
        layer=name,
        seconds={phase: s for phase, s in seconds.items() if s},
        share=_share(sum(seconds.values()), whole_seconds),
        kernels=sum(k.count for k in lines),
        macs=sum(k.macs for k in lines),
        hbm_bytes=sum(k.hbm_bytes for k in lines),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _plain(line: Any) -> dict[str, Any]:
    values = {name: getattr(line, name) for name in type(line).__dataclass_fields__}
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}


# --- text -------------------------------------------------------------------------------------------------------------


def _layer_table(lines: Sequence[LayerLine], most: int) -> list[str]:
    heading = (
        f"{'layer':48} {'share':>6} {'time':>11} {'forward':>11} {'backward':>11} {'update':>11} {'GMACs':>9} {'MB':>10} {'kernels':>8}"
    )
    return [heading, *_shown(lines, most, _layer_text, "layers")]


def _layer_text(line: LayerLine) -> str:
    phases = " ".join(f"{seconds_text(line.seconds[p]) if p in line.seconds else '-':>11}" for p in PHASES)
    work = f"{line.macs / 1e9:9.3f} {line.hbm_bytes / 1e6:10.2f} {line.kernels:8.4g}"
    return f"{_short(line.layer, 48):48} {line.share:6.1%} {seconds_text(line.total_seconds):>11} {phases} {work}"


def _kernel_table(lines: Sequence[KernelLine], most: int) -> list[str]:
    heading = f"{'time':>11} {'share':>6} {'times':>6} {'bound':7} {'phase':8} {'VMEM KiB':>8} {'TFLOP/s':>8}  kernel"
    return [heading, *_shown(lines, most, _kernel_text, "kernels")]


def _kernel_text(line: KernelLine) -> str:
    rate = f"{line.vmem_bytes / 1024:8.0f} {line.flops_per_second / 1e12:8.2f}"
    where = f"{line.layer}: {line.what}{f'  {line.source}' if line.source else ''}"
    return f"{seconds_text(line.seconds):>11} {line.share:6.1%} {line.count:6.4g} {line.bound:7} {line.phase:8} {rate}  {where}"


def _queue_table(lines: Sequence[QueueLine]) -> list[str]:
    return [f"{'queue':8} {'busy':>11} {'share':>6}", *(f"{q.queue:8} {seconds_text(q.seconds):>11} {q.share:6.1%}" for q in lines)]


def _shown(lines: Sequence[Any], most: int, text: Callable[[Any], str], what: str) -> list[str]:
    rest = len(lines) - most
    return [*map(text, lines[:most]), *([f"... and {rest} more {what}"] if rest > 0 else [])]


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"...{text[3 - width :]}"
