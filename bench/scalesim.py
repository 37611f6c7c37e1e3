"""How long it takes to say how long ResNet-50 inference of one image takes: `tpuflow.estimate` beside SCALE-Sim, each in fresh processes.

SCALE-Sim (`pip install -e '.[bench]'`) is given the 53 convolutions and the dense layer of the model that tpuflow traces, on the array
and memories of the TPU configuration in its repository; tpuflow does every layer (normalisation, pooling, additions too) on a chip with
arrays of the same size, from the Flax module: shapes of its variables, trace, passes, kernels, memory plan, time. Imports are stated
apart.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import publish

ROUNDS = 3  # runs of ours before SCALE-Sim's one, and as many after
CHIP, ARRAY = "tpu-v6e", 256
CONFIG = f"""[general]
run_name = resnet50
[run_presets]
InterfaceBandwidth = CALC
UseRamulatorTrace = False
[architecture_presets]
ArrayHeight = {ARRAY}
ArrayWidth = {ARRAY}
IfmapSramSzkB = 6144
FilterSramSzkB = 6144
OfmapSramSzkB = 2048
IfmapOffset = 0
FilterOffset = 10000000
OfmapOffset = 20000000
Dataflow = ws
ReadRequestBuffer = 512
WriteRequestBuffer = 512
[layout]
IfmapCustomLayout = False
IfmapSRAMBankBandwidth = 10
IfmapSRAMBankNum = 10
IfmapSRAMBankPort = 2
FilterCustomLayout = False
FilterSRAMBankBandwidth = 10
FilterSRAMBankNum = 10
FilterSRAMBankPort = 2
[sparsity]
SparsitySupport = false
"""
"""Array, dataflow and memories of SCALE-Sim's google.cfg; what else version 3 asks for as in its other configurations."""

Layer = tuple[str, int, int, int, int, int, int, int]
"""Name, height and width of the padded input, height and width of the window, channels, filters, stride."""


def layers() -> list[Layer]:
    """Every product of ResNet-50 on one image, from the jaxpr that tpuflow compiles."""
    import jax

    function, shapes = _inference()
    found = [_layer(e, i) for i, e in enumerate(_products(jax.make_jaxpr(function)(*shapes).jaxpr))]
    assert len(found) == 54, "53 convolutions and a dense layer"
    return found


def macs(layer: Layer) -> int:
    """Multiply-adds of a layer."""
    _, height, width, window_height, window_width, channels, filters, stride = layer
    places = ((height - window_height) // stride + 1) * ((width - window_width) // stride + 1)
    return places * window_height * window_width * channels * filters


def ours() -> dict[str, float]:
    """Seconds of importing and of estimating, and what was found."""
    began = time.perf_counter()
    import jax  # noqa: F401
    from flax import linen  # noqa: F401

    from tpuflow import estimate

    imported = time.perf_counter()
    function, shapes = _inference()
    found = estimate(function, *shapes, chip=CHIP, policy="bf16")
    done = time.perf_counter()
    return {
        "import_seconds": imported - began,
        "seconds": done - imported,
        "modelled_seconds": found.time.device_seconds,
        "macs": sum(found.time.work.macs.values()),
        "kernels": len(found.time.kernels),
    }


def theirs(topology: Sequence[Layer]) -> dict[str, float]:
    """Seconds of importing SCALE-Sim and of its run without writing traces, and the cycles it finds."""
    began = time.perf_counter()
    from scalesim.memory import double_buffered_scratchpad_mem
    from scalesim.scale_sim import scalesim

    # It takes int() of the largest of arrays of one element, which NumPy refuses since 2.4; the number is the same.
    double_buffered_scratchpad_mem.max = lambda *x: np.asarray(max(*x)).item()  # type: ignore[attr-defined]
    imported = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        files = {name: Path(folder) / name for name in ("scale.cfg", "resnet50.csv", "layout.csv")}
        files["scale.cfg"].write_text(CONFIG)
        head = "Layer name, IFMAP Height, IFMAP Width, Filter Height, Filter Width, Channels, Num Filter, Strides,"
        files["resnet50.csv"].write_text("\n".join([head, *(", ".join(map(str, layer)) + "," for layer in topology)]) + "\n")
        files["layout.csv"].write_text("Layer name,\n")
        config, csv, layout = (str(path) for path in files.values())
        run = scalesim(save_disk_space=True, verbose=False, config=config, topology=csv, layout=layout)
        run.run_scale(top_path=folder)
        cycles = sum(layer.get_compute_report_items()[0] for layer in run.runner.single_layer_sim_object_list)
    return {"import_seconds": imported - began, "seconds": time.perf_counter() - imported, "cycles": float(cycles)}


def run() -> tuple[str, Mapping[str, Any]]:
    """Ours before and after theirs, medians of ours, and how many times faster."""
    topology = layers()
    first = [_in_process("ours") for _ in range(ROUNDS)]
    peer = _in_process("scalesim", json.dumps(topology))
    runs = [*first, *(_in_process("ours") for _ in range(ROUNDS))]
    mine = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    total = sum(map(macs, topology))
    assert mine["macs"] == total, f"the same work: {mine['macs']:.0f} and {total} multiply-adds"
    ratio = peer["seconds"] / mine["seconds"]
    lines = [
        f"ResNet-50 inference, one image, {total / 1e9:.2f} G multiply-adds, {ARRAY}x{ARRAY} arrays",
        f"{'':10} {'import s':>9} {'run s':>8}",
        f"{'SCALE-Sim':10} {peer['import_seconds']:9.2f} {peer['seconds']:8.2f}   54 layers, {peer['cycles']:.0f} cycles",
        f"{'tpuflow':10} {mine['import_seconds']:9.2f} {mine['seconds']:8.2f}   {mine['kernels']:.0f} kernels, "
        f"{mine['modelled_seconds'] * 1e6:.0f} us on {CHIP} (median of {len(runs)} runs)",
        f"tpuflow is {ratio:.0f} times as fast; imports included {_whole(peer) / _whole(mine):.0f} times",
    ]
    return "\n".join(lines), {"scalesim": peer, "tpuflow": mine, "runs": runs, "ratio": ratio, "whole_ratio": _whole(peer) / _whole(mine)}


def _whole(row: Mapping[str, float]) -> float:
    return row["import_seconds"] + row["seconds"]


def _inference() -> tuple[Any, tuple[Any, Any]]:
    """ResNet-50 as a function of its variables and one image, and their shapes."""
    import jax
    import jax.numpy as jnp

    from models.resnet import resnet50

    model, image = resnet50(1000), jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    return model.apply, (jax.eval_shape(model.init, jax.random.key(0), image), image)


def _products(jaxpr: Any) -> Iterator[Any]:
    """The convolutions and products of a jaxpr and those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            yield equation
        for value in equation.params.values():
            yield from _products(value.jaxpr) if hasattr(value, "jaxpr") else ()


def _layer(equation: Any, number: int) -> Layer:
    """A product as SCALE-Sim knows it; a dense layer is a convolution of one place."""
    (_, *image, channels), kernel = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    if equation.primitive.name == "dot_general":
        return f"dense{number}", 1, 1, 1, 1, channels, kernel[1], 1
    (stride, _), padding = equation.params["window_strides"], equation.params["padding"]
    height, width = (n + low + high for n, (low, high) in zip(image, padding, strict=True))
    assert math.prod(equation.params["rhs_dilation"]) == equation.params["feature_group_count"] == 1
    return f"conv{number}", height, width, kernel[0], kernel[1], channels, kernel[3], stride


def _in_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scalesim", "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:5])} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:3] == ["--one", "ours"]:
        print(json.dumps(ours()))
    elif sys.argv[1:3] == ["--one", "scalesim"]:
        print(json.dumps(theirs([tuple(layer) for layer in json.loads(sys.argv[3])])))
    else:
        publish(__doc__, run)
