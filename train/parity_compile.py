"""A BERT in compile mode: `python -m train.parity compile` writes one training step to files, runs it from them, and makes it in PyTorch.

Compiling and running are processes of their own, of which the time and the most memory at once are measured. PyTorch's model is
transformers' BertForPreTraining with the dumped weights, on the dumped batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models import bert
from tpuflow.errors import TpuflowError
from tpuflow.importers import state_dict
from train.compile_mode import CONST_NAME, MANIFEST, listing
from train.compile_models import MODELS, Sizes
from train.published import exit_status, judged
from train.torch_packages import import_package

NAMES = ("bert-large", "bert-base", "bert-tiny")
"""Those of the models of compile mode that are compared."""

SECONDS_BOUND, MEMORY_BOUND = 60.0, 8 * 2**30
"""From the Flax module to the binary in bytes, interpreter and imports among it, and the most memory at once."""

LOSS_BOUND, PARAMETER_BOUND = 2e-6, 1e-5
"""The loss, relative, and the largest absolute difference of any parameter after the update from PyTorch's, in fp32."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compiled, and for what."""

    model: str
    chip: str
    batch: int
    sequence: int
    rate: float

    @property
    def config(self) -> bert.Config:
        """The model's configuration, in which nothing drops out."""
        return MODELS[self.model].model(Sizes(self.batch, 0, self.sequence, dropout=False)).config

    def compile_words(self, folder: str) -> list[str]:
        """What Python is called with to compile into a folder."""
        sizes = f"--no-dropout --batch {self.batch} --sequence {self.sequence} --lr {self.rate:g}"
        words = f"-m train compile --model {self.model} --chip {self.chip} --debug {CONST_NAME} {sizes}"
        return [*words.split(), "--out", folder]

    def run_words(self, folder: Path) -> list[str]:
        """The same to run what lies there, which writes out.npz beside it."""
        inputs = [str(folder / f"{self.model}.{kind}.npz") for kind in ("weights", "inputs")]
        return ["-m", "tpuflow", "run", str(folder / f"{self.model}.tpx"), "--inputs", *inputs, "--outputs", str(folder / "out.npz")]


def measured(words: Sequence[str]) -> dict[str, float]:
    """Run Python with these words: seconds by the clock and of processors, and the most memory at once.

    Raises:
      TpuflowError: it failed; its last words.
    """
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise TpuflowError(f"python {shlex.join(words)}: exit status {process.returncode}\n{said.read()[-2000:]}")
    return {"seconds": seconds, "processor_seconds": used.ru_utime + used.ru_stime, "peak_bytes": 1024.0 * used.ru_maxrss}


def beside_pytorch(
    before: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], config: bert.Config, rate: float
) -> dict[str, Any]:
    """The step that PyTorch makes of the arrays `before` on the batch, by SGD, and that of the arrays `after`: both losses, how far apart
    any parameter is at most, and which."""  # fmt: skip
    transformers = import_package("transformers")
    import torch

    network = transformers.BertForPreTraining(transformers.AutoConfig.for_model(**config.to_json()))
    weights = {name: torch.from_numpy(array) for name, array in _in_torch(before, config).items()}
    left = network.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all("decoder" in name for name in left.missing_keys), "the decoder is tied to the embedding"
    given = {name: torch.from_numpy(array.astype(np.int64)) for name, array in batch.items()}
    found = network(**{name: given[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
    words = torch.take_along_dim(found.prediction_logits, given["masked_positions"][..., None], 1)
    entropy = torch.nn.functional.cross_entropy
    loss = entropy(words.flatten(0, 1), given["masked_labels"].flatten())
    loss = loss + entropy(found.seq_relationship_logits, given["next_sentence_label"])
    loss.backward()
    torch.optim.SGD(network.parameters(), lr=rate).step()
    theirs = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    apart = {name: float(np.abs(array - theirs[name]).max()) for name, array in _in_torch(after, config).items()}
    worst = max(apart, key=apart.__getitem__)
    return {"loss": float(after["loss"]), "torch_loss": loss.item(), "parameters_apart": apart[worst], "worst_parameter": worst}


def _in_torch(arrays: Mapping[str, np.ndarray], config: bert.Config) -> dict[str, np.ndarray]:
    """The parameters among arrays by the names of a Program's ports, as transformers names them, each once."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        kind, *path = name.split("/")
        if kind == "params":
            inner = tree
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = array
    return state_dict({"params": tree}, bert.torch_layers(config))


def report(setting: Setting, folder: Path) -> dict[str, Any]:
    """Compile into the folder, run from it, compare; all figures, and "failed": how many bounds do not hold."""
    import_package("transformers")  # first what may not be installed
    compiling, files = measured(setting.compile_words(str(folder))), listing(folder)
    running = measured(setting.run_words(folder))
    before, batch, after = (_arrays(folder / name) for name in (f"{setting.model}.weights.npz", f"{setting.model}.inputs.npz", "out.npz"))
    beside = beside_pytorch(before, batch, after, setting.config, setting.rate)
    manifest = json.loads((folder / MANIFEST).read_text())
    holds = (
        compiling["seconds"] <= SECONDS_BOUND,
        compiling["peak_bytes"] <= MEMORY_BOUND,
        abs(beside["loss"] / beside["torch_loss"] - 1) <= LOSS_BOUND,
        beside["parameters_apart"] <= PARAMETER_BOUND,
    )
    return {
        "command": shlex.join(["python", *setting.compile_words("dump")]),
        "compiling": compiling,
        "running": running,
        "files": files,
        "memory_bytes": manifest["memory_bytes"],
        "modelled": manifest["modelled"],
        **beside,
        "failed": holds.count(False),
    }


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""

    def row(what: str, used: Mapping[str, float]) -> str:
        seconds, processor, memory = used["seconds"], used["processor_seconds"], used["peak_bytes"] / 2**30
        return f"{what:10} {seconds:7.1f} s by the clock, {processor:7.1f} s of processor time, {memory:5.2f} GiB of memory at most"

    modelled, peak = figures["modelled"], figures["memory_bytes"]["peak"]
    return "\n".join(
        [
            figures["files"],
            "",
            row("compile", figures["compiling"]),
            row("tpuflow run", figures["running"]),
            f"modelled   {1e3 * modelled['modelled_seconds']:7.2f} ms on the chip, {peak / 2**20:.0f} MiB of its memory",
            f"loss       {figures['loss']!r}, PyTorch's {figures['torch_loss']!r}",
            f"parameters {figures['parameters_apart']:.1e} apart at most after the update, in {figures['worst_parameter']}",
            f"{figures['failed']} bounds fail (compile {SECONDS_BOUND:g} s and {MEMORY_BOUND / 2**30:g} GiB, "
            f"loss {LOSS_BOUND:g} relative, parameters {PARAMETER_BOUND:g})",
        ]
    )


def page(figures: Mapping[str, Any], model: str, path: Path) -> str:
    """The figures as a page of the documentation."""
    return f"""# {model} in compile mode

Made by `python -m train.parity compile --model {model} --page {path}`; do not edit. One training step, written to files, run from them
([compile mode](compile.md)), and made by transformers' `BertForPreTraining` in PyTorch from the dumped weights and batch.

```
$ {figures["command"]}
{table(figures)}
```
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, run, print, write JSON; 0 if every bound holds, 1 if one fails, 2 if something is missing, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.parity compile", description=__doc__)
    parser.add_argument("--model", choices=NAMES, default="bert-large", help="[%(default)s]")
    parser.add_argument("--chip", default="bm1690", help="[%(default)s]")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="pairs of sentences [%(default)s]")
    parser.add_argument("--sequence", type=int, default=128, metavar="N", help="words of a pair [%(default)s]")
    parser.add_argument("--lr", type=float, default=0.01, metavar="X", help="rate of SGD [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the files there, an empty folder or one to make")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the figures as a page in Markdown")
    parser.add_argument("--json", type=Path, default=Path("parity_compile.json"), metavar="FILE", help="[%(default)s]")
    given = parser.parse_args(argv)
    return exit_status(lambda: _published(given), given.json)


def _published(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch) / "dump"
        figures = report(Setting(given.model, given.chip, given.batch, given.sequence, given.lr), folder)
    if given.page:
        given.page.write_text(page(figures, given.model, given.page))
    return judged(figures, table, given.json)
