"""What a training of YOLOv5s loses in fp16 and mixed precision, and where: blood cells at 320x320, batch 2, as docs/yolov5_numerics.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tpuflow
from bench.step_estimates import DOCS
from tpuflow.numerics.report import NumericsReport, aligned, percent, timeline
from tpuflow.numerics.rows import OperationRow, TensorFigures, UpdateRow, grouped, magnitude_text
from tpuflow.reports.files import write_json
from train.detection.batches import TrainingBatches
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.optimizer import make_optimizer
from train.detection.schedules import Plan
from train.pipeline import Loader
from train.yolov5 import EMA, Job, Yolov5Options, prepare

POLICIES = ("fp16", "mixed")
"""Whole in fp16, which is what the page takes apart, and beside it the remedy."""
SIZE, BATCH, EPOCHS = 320, 2, 60
"""Two pictures: a batch of more takes that much more of the host's memory and time, and loses the same."""
WORST = 10
"""Rows of each table of the worst."""


def looked_at(plan: Plan) -> int:
    """After how many steps to look at the next one: it is behind the warm-up and makes an update."""
    return next(int(step) for step in plan.updates if step > plan.warmup_steps)


def reports(job: Job, policy: str) -> tuple[NumericsReport, ...]:
    """Of the first step, and of one behind the warm-up, of `python -m train yolov5 --numerics N` without what is evaluated and written."""
    batches = TrainingBatches(job.train, SIZE, BATCH, job.hyp, seed=0, keep=True)
    plan = Plan(job.hyp, EPOCHS, len(batches), BATCH)
    steps = looked_at(plan)
    result = tpuflow.train(
        job.network, Loader(batches, threads=1), policy=policy, optimizer=make_optimizer("SGD", plan),
        loss_fn=detection_loss(DetectionLoss(job.network.config, job.hyp, SIZE)), inputs=pixels, params=job.variables, ema=EMA,
        accumulate_steps=plan.accumulation, epochs=1, sink_size=steps, numerics=steps, seed=0, progress=False,
    )  # fmt: skip
    print(result.report(), flush=True)
    return result.numerics


def shares_text(found: Mapping[str, Sequence[NumericsReport]]) -> str:
    """What the last step of each training loses, a policy a column."""
    lasts = [reports[-1] for reports in found.values()]
    tensors = ("activation", "activation gradient", "parameter gradient")
    kinds = list(dict.fromkeys(u.parameter for u in lasts[0].updates))
    rows = [(f"{tensor}s to zero", *(percent(_tensor(r, tensor).underflow_share) for r in lasts)) for tensor in tensors]
    rows += [(f"{tensor}s subnormal", *(percent(_tensor(r, tensor).subnormal_share) for r in lasts)) for tensor in tensors]
    rows += [(f"updates of every {kind} that round to nothing", *(_lost(r, kind) for r in lasts)) for kind in kinds]
    return aligned(("share of", *found), rows, left=1)


def _tensor(report: NumericsReport, tensor: str) -> TensorFigures:
    return next(row for row in grouped(report.rows, "tensor") if row.tensor == tensor)


def _lost(report: NumericsReport, parameter: str) -> str:
    """Which share of a kind of parameter's updates is lost; a step that made no update has none."""
    if report.all_updates is None:
        return "no update"
    return percent(next(u for u in grouped(report.updates, "parameter") if u.parameter == parameter).lost_share)


def operations_text(report: NumericsReport) -> str:
    """The operations that most numbers underflow in."""
    worst = sorted(report.underflows, key=lambda o: -o.underflow)[:WORST]
    heads = ("operation", "layer", "phase", "type", "to zero", "of it", "largest", "source")
    return aligned(heads, [_operation(o) for o in worst], left=4)


def _operation(o: OperationRow) -> tuple[str, ...]:
    return (o.primitive, o.layer, o.phase, o.dtype, str(o.underflow), percent(o.underflow_share), magnitude_text(o.largest), o.source)


def layers_text(report: NumericsReport, tensor: str, worth: Callable[[TensorFigures], float]) -> str:
    """The layers in which a kind of tensor fares worst."""
    rows = sorted((r for r in grouped(report.rows, "layer", "tensor") if r.tensor == tensor), key=lambda r: -worth(r))[:WORST]
    heads = ("layer", "elements", "inf+nan", "to zero", "subnormal", "smallest", "largest")
    cells = [
        (r.layer, str(r.elements), str(r.nonfinite), percent(r.underflow_share), percent(r.subnormal_share),
         magnitude_text(r.smallest), magnitude_text(r.largest)) for r in rows
    ]  # fmt: skip
    return aligned(heads, cells, left=1)


def updates_text(updates: Sequence[UpdateRow]) -> str:
    """What becomes of the updates of each kind of parameter, and where most are lost."""
    heads = ("parameters", "type", "with gradient", "rounds to nothing", "of it vanished")

    def cells(name: str, u: UpdateRow) -> tuple[str, ...]:
        return (name, u.dtype, str(u.with_gradient), percent(u.lost_share), percent(u.vanished / max(u.with_gradient, 1)))

    kinds = [cells(f"every {u.parameter}", u) for u in grouped(updates, "parameter", "dtype")]
    worst = sorted((u for u in updates if u.with_gradient), key=lambda u: -u.lost)[:WORST]
    return aligned(heads, [*kinds, *(cells(f"{u.layer} {u.parameter}", u) for u in worst)], left=2)


def page(found: Mapping[str, Sequence[NumericsReport]]) -> str:
    """The text of docs/yolov5_numerics.md."""
    last = found["fp16"][-1]
    steps = last.settings["step"]
    sections = {
        f"What is lost in the step after {steps}": shares_text(found),
        "Two steps of each training": "\n\n".join(f"{policy}\n{timeline(reports)}" for policy, reports in found.items()),
        f"fp16: the step after {steps}": "\n".join(last.explain()),
        "fp16: parameters whose updates are lost": updates_text(last.updates),
        "fp16: layers by what underflows in the backward pass": layers_text(last, "activation gradient", lambda r: r.underflow_share),
        "fp16: layers by subnormal gradients of their parameters": layers_text(last, "parameter gradient", lambda r: r.subnormal_share),
        "fp16: layers by their largest activations": layers_text(last, "activation", lambda r: r.largest),
        "fp16: operations that most numbers underflow in": operations_text(last),
        f"mixed: the step after {steps}": "\n".join(found["mixed"][-1].explain()),
    }
    command = f"python -m train yolov5 --data bccd --img {SIZE} --batch-size {BATCH} --epochs {EPOCHS} --policy fp16 --numerics {steps}"
    head = f"""# What fp16 loses in YOLOv5s

Made by `python -m bench.yolov5_numerics`; do not edit. YOLOv5s from new weights on the blood cells, {steps} steps wholly in
fp16, as

```
{command}
```

does, and as many in mixed precision (`--policy mixed`: products in fp16, parameters and their updates in fp32, a loss scale). Every
number of the first step was measured, and of step {steps + 1}, which is behind the warm-up and makes an update. In the first step the
rate of all but the biases is zero, so their updates vanish in any precision. The infinities of `_fits` are no fault, and those of
any precision: boxes that fill up a batch have size 0, and fit no anchor. A first step that is skipped had too large a loss scale, which
is halved then. A parameter named `scale` is one of batch normalisation.
[What the words mean](numerics.md#what-the-words-mean)."""
    return "\n".join([head, *(f"\n## {title}\n\n```\n{text}\n```" for title, text in sections.items())]) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.yolov5_numerics", description=__doc__)
    parser.add_argument("--weights", type=Path, help="start from these; the page stays as it is and is printed")
    parser.add_argument("--data-dir", type=Path, help="folder of the blood cells; else $TPUFLOW_DATA, the user's cache, a download")
    parser.add_argument("--json", type=Path, help="write all rows of all reports here")
    given = parser.parse_args()
    job = prepare(Yolov5Options(data="bccd", data_dir=given.data_dir, imgsz=SIZE, batch_size=BATCH, weights=given.weights))
    found = {policy: reports(job, policy) for policy in POLICIES}
    text = page(found)
    if given.weights is None:
        (DOCS / "yolov5_numerics.md").write_text(text)
    print(text)
    if given.json:
        write_json(given.json, {policy: [r.as_dict() for r in rows] for policy, rows in found.items()})


if __name__ == "__main__":
    main()
