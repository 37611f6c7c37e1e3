"""Files of figures in `bench/results/` as the blocks of pages that show them; `bench.pages` puts them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
MB = 1e6


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *rows))


def _named(figures: Figures, wanted: Callable[[Figures], bool]) -> str:
    rows = [
        (
            row["words"],
            f"`{row['command'].removeprefix('tpuflow estimate ')}`",
            f"{row['cpu_seconds']:.1f}",
            f"{row['peak_bytes'] / MB:.0f}",
        )
        for row in figures["rows"]
        if wanted(row)
    ]
    heading = ("a training step of", "`tpuflow estimate`", "seconds of processors", "MB of the host's memory")
    taken = f"medians of {figures['rounds']} processes" if figures["rounds"] > 1 else "of one process each"
    return f"{table(heading, rows)}\n\nThey are {taken} ({figures['machine']}), which other work on the machine makes greater."


def seconds(figures: Figures) -> str:
    """What estimates take."""
    return _named(figures, lambda row: "diffusion" not in row["target"])


def diffusion_compiling(figures: Figures) -> str:
    """What estimates of Stable Diffusion in full size take: trace, compiler and timing."""
    return _named(figures, lambda row: "diffusion" in row["target"])


def depth(figures: Figures) -> str:
    """Ten times the depth."""
    rows = [
        (name, " and ".join(map(str, row["layers"])), *(f"{one:.2f}" for one in row["seconds"]), f"{row['ratio']:.1f}")
        for name, row in figures["rows"].items()
    ]
    shown = table(("network", "layers", "seconds of processors", "with the more", "times"), rows)
    return f"{shown}\n\nThe limit is {figures['limit']:g} times ({figures['machine']})."


def scalesim(figures: Figures) -> str:
    """Beside SCALE-Sim."""
    rows = [(name, f"{figures[name]['seconds']:.2f}", f"{figures[name]['import_seconds']:.2f}") for name in ("scalesim", "tpuflow")]
    ratios = f"{figures['ratio']:.0f} times as fast; with imports {figures['whole_ratio']:.0f} times ({len(figures['runs'])} processes)."
    return f"{table(('', 'seconds', 'imports'), rows)}\n\n{ratios}"


def fidelity(figures: Figures) -> str:
    """What exact bits cost."""
    rows = [(name, f"{row['time_ratio']:.2f}", f"{row['memory_ratio']:.2f}") for name, row in figures["rows"].items()]
    return table(("", "time, of native", "memory, of native"), rows)


def diffusion_losses(figures: Figures) -> str:
    """The small text-to-image pipeline beside others."""
    steps = f"{figures['steps']} updates of {figures['accumulate']} steps, {figures['parameters'] / 1e6:.0f} million parameters"
    differences = [(pair, f"{one['largest']:.1e}", str(one["at_step"])) for pair, one in figures["differences"].items()]
    means = [(name, f"{mean:.3f}", f"{_last(figures['losses'][name]):.3f}") for name, mean in figures["mean_loss"].items()]
    skipped = ", ".join(f"{name} {count}" for name, count in figures["skipped"].items())
    return "\n\n".join(
        [
            table((f"losses ({steps})", "largest relative difference", "at step"), differences),
            table(("", "mean loss", "of the last tenth"), means),
            f"Updates that were skipped since a gradient overflowed: {skipped}.",
            "\n".join(["```", *figures["numerics"], "```"]),
        ]
    )


def mesh_speed(figures: Figures) -> str:
    """Several chips beside one with the whole batch."""
    shardings = list(next(iter(figures["rows"].values()))["wall"])
    rows = [(name, f"{row['one chip, ms']:.1f}", *(f"{row['wall'][x]:.2f}" for x in shardings)) for name, row in figures["rows"].items()]
    heading = ("a training step of", "one chip, ms", *(f"{figures['chips']} chips, {x}" for x in shardings))
    return f"{table(heading, rows)}\n\nTimes one chip's (limit {figures['limit']:g}; {figures['machine']})."


def mesh_processes(figures: Figures) -> str:
    """Two processes beside one."""
    rows = [(name, *(f"{row[key]:.2f}" for key in ("one process, ms", "wall", "processor"))) for name, row in figures["rows"].items()]
    heading = ("a training step of", "one process, ms", "two processes, times", "their processors' time, times")
    return f"{table(heading, rows)}\n\nWith half of the cores each (limit {figures['limit']:g}; {figures['machine']})."


def _last(losses: Sequence[float]) -> float:
    tail = losses[-len(losses) // 10 :]
    return sum(tail) / len(tail)


def speed(figures: Figures) -> str:
    """Contenders side by side, and the ratios that have a limit."""
    rows = [
        (name, f"{1e3 * median:.1f}", f"{figures['cold_seconds'][name]:.0f}", f"{figures['peak_bytes'][name] / MB:.0f}")
        for name, median in figures["medians"].items()
    ]
    ratios = [(row["of"], row["ours"], row["other"], f"{row['ratio']:.2f}", f"{row['limit']:g}") for row in figures["ratios"]]
    heading = ("", "ms a step", "seconds of the first run", "MB at the peak")
    return f"{table(heading, rows)}\n\n{table(('of', '', 'beside', 'times', 'limit'), ratios)}\n\nMedians of {figures['rounds']} runs."


def language(figures: Figures) -> str:
    """A language model beside others: losses of all updates, and the validation's."""
    rows = [
        (pair, f"{one['largest']:.1e}", str(one["at_step"]), f"{one['validation']:.1e}") for pair, one in figures["differences"].items()
    ]
    ends = ", ".join(f"{name} {loss:.4f}" for name, loss in figures["validation"].items())
    heading = ("losses", "largest relative difference", "at step", "difference of the validation's")
    return f"{table(heading, rows)}\n\nValidation losses at the end: {ends}."


def classifier(figures: Figures) -> str:
    """A classifier's losses beside PyTorch's on one thread, and the test accuracies."""
    others = [(name, f"{one['largest']:.1e}", str(one["at_step"])) for name, one in figures["differences"].items() if one["largest"]]
    ends = ", ".join(f"{name} {percent:.2f} %" for name, percent in figures["accuracy"].items())
    heading = (f"losses of {figures['steps']} steps", "largest relative difference from PyTorch's", "at step")
    return f"{table(heading, others)}\n\nTest accuracy: {ends}."


def curves(figures: Figures) -> str:
    """Many trainings in two precisions: what they end with, and by how much pairs from the same weights differ."""
    rows = [
        (
            name,
            f"{found['mean']:.1f} %",
            f"{found['deviation']:.1f}",
            f"{figures['avg_losses'][name]['mean']:.2f}",
            str(len(found["values"])),
        )
        for name, found in figures["accuracies"].items()
    ]
    pairs = figures["accuracy_difference"]
    between = f"{min(pairs['values']):+.1f} and {max(pairs['values']):+.1f}"
    mean = f"{pairs['mean']:.1f} in the mean (standard error {pairs['error']:.1f})"
    differences = f"Accuracies of a pair differ by between {between} points, by {mean}."
    heading = (f"after {figures['settings']['steps']} steps", "accuracy", "standard deviation", "average test loss", "seeds")
    return f"{table(heading, rows)}\n\n{differences}"


def detection(figures: Figures) -> str:
    """A detector beside PyTorch's."""
    return table(("", "mAP@0.5"), [(name, f"{value:.3f}") for name, value in figures["mAP50"].items()])
