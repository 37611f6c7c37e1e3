"""Compile mode: one training step from a Flax module to the device's binary, every stage of it written to files.

The step is forward, backward and an update by SGD. Written are the jaxpr and the graph after every pass as text, the weights and the
inputs as .npz, the binary as .tpx and as assembly text, and manifest.json, last of all, which says what all of it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import tpuflow
from tpuflow.amp import get_policy
from tpuflow.archives import storable, write_arrays
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_jaxpr
from tpuflow.data.batching import names_of
from tpuflow.device.timing import time_program
from tpuflow.errors import ConfigError, unknown
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import code_hash, save
from tpuflow.isa.program import Program
from tpuflow.lower.graph.graph import Graph
from tpuflow.stages.analysis import cost_analysis, memory_analysis
from tpuflow.stages.differences import Stage, first_difference
from tpuflow.stages.flattening import leaf_names
from train.compile_models import FIRST_LOGIT, MODELS, OWN, Sizes, Subject

CONST_NAME = "const_name"
MANIFEST = "manifest.json"
HASHED_AT_ONCE = 2**20
PACKAGES = ("tpuflow", "jax", "jaxlib", "flax", "optax", "numpy")
MEMORY = ("argument", "output", "alias", "constant", "temp")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; sizes that are None are the model's own."""

    model: str
    out: Path
    chip: str = "bm1690"
    debug: str | None = None
    batch: int = 1
    image_size: int | None = None
    sequence: int | None = None
    policy: str = "fp32"
    loss: str | None = None
    lr: float = 0.01
    seed: int = 0
    dropout: bool = True
    verify: bool = False

    def check(self) -> None:
        """That what has no table of its own is in its range.

        Raises:
          ConfigError: it is not.
        """
        get_policy(self.policy)
        if not 0.0 < self.lr < math.inf:
            raise ConfigError(f"--lr: expected a rate above 0, got {self.lr:g}.")
        if self.seed < 0:
            raise ConfigError(f"--seed: expected a whole number from 0 on, got {self.seed}.")

    def subject(self) -> Subject:
        """The model's row.

        Raises:
          ConfigError: there is none.
        """
        if self.model not in MODELS:
            raise unknown("model", self.model, MODELS)
        return MODELS[self.model]

    def sizes(self) -> Sizes:
        """The sizes of a batch.

        Raises:
          ConfigError: the model's batches have no such size, or it is out of range.
        """
        subject, most = self.subject(), {"sequence": self.subject().most_words}
        found = {}
        for name, own in (("batch", 1), ("image_size", subject.image_size), ("sequence", subject.sequence)):
            given, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if given is not None and own is None:
                raise ConfigError(f"{flag}: batches of {self.model} have no such size; leave it out.")
            found[name] = own or 0 if given is None else given
            if given is not None and not 1 <= given <= (most.get(name) or given):
                bound = f" to {most[name]}" if most.get(name) else " on"
                raise ConfigError(f"{flag}: expected a whole number from 1{bound}, got {given}.")
        if not self.dropout and not subject.optional_dropout:
            raise ConfigError(f"--no-dropout: {self.model} is as its authors have it; leave that out.")
        return Sizes(**found, dropout=self.dropout)


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, traced: the names of its inputs and outputs are those of the Program's ports. The first `kept` inputs are what
    training changes, which the Program may overwrite."""

    jaxpr: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: int


def add_command(commands: Any) -> argparse.ArgumentParser:
    """`compile` among the recipes of the command line."""
    text = "compile a training step and write every stage: IR as text, weights, device binary"
    parser = commands.add_parser("compile", help=text, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="an empty folder, or one to make")
    parser.add_argument("--chip", default="bm1690", help="row of the chip catalogue, or a .toml file with one's own [%(default)s]")
    parser.add_argument("--debug", choices=(CONST_NAME,), help="the same names in every run; else they bear the time")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples [%(default)s]")
    parser.add_argument("--image-size", type=int, metavar="N", help="side of images [the model's own]")
    parser.add_argument("--sequence", type=int, metavar="N", help="words of a sequence [128]")
    parser.add_argument("--policy", default="fp32", help="precision, such as fp32, fp16, mixed, bf16, mixed_bf16 [%(default)s]")
    parser.add_argument("--loss", choices=(OWN, FIRST_LOGIT), help="[resnet50: first-logit, as the vendor's page; else cross-entropy]")
    parser.add_argument("--lr", type=float, default=0.01, metavar="X", help="rate of SGD [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and inputs [%(default)s]")
    parser.add_argument("--no-dropout", dest="dropout", action="store_false", help="for comparisons: nothing drops out")
    parser.add_argument("--verify", action="store_true", help="compute every stage and the binary, and name the first tensor that differs")
    return parser


def run(options: Options) -> int:
    """Compile and write; 0, or 1 if a stage differs from the one before it.

    Raises:
      ConfigError: an option does not fit, or the folder is not empty or cannot be written.
      And what compiling raises; what was written until then stays, without a manifest.
    """
    options.check()
    sizes, chip = options.sizes(), get_chip(options.chip)
    folder = _folder(options.out)
    try:
        return _compiled(options, sizes, chip, folder)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror}); what is there is not whole.") from error


def _compiled(options: Options, sizes: Sizes, chip: Chip, folder: Path) -> int:
    began = time.perf_counter()
    name = options.model if options.debug == CONST_NAME else f"{options.model}-{time.strftime('%Y%m%d-%H%M%S')}"
    step, arrays = make_step(options, sizes, folder / name)
    stages: list[Stage] = []
    names: list[str] = []

    def watch(stage: str, graph: Graph) -> None:
        names.append(f"{len(names):02d}-{stage}")
        (folder / f"{name}.{names[-1]}.graph").write_text(str(graph), encoding="utf-8")
        if options.verify:
            stages.append((names[-1], graph))

    donated = [i < step.kept for i in range(len(step.inputs))]
    program = compile_jaxpr(
        step.jaxpr, name=options.model, chip=chip, input_names=step.inputs, output_names=step.outputs, donated=donated, watch=watch
    )
    save(program, folder / f"{name}.tpx")
    (folder / f"{name}.tpxs").write_text(disassemble(program), encoding="utf-8")
    _write_manifest(folder, name, options, sizes, names, program)
    print(listing(folder))
    print(f"{options.model} for {chip.name} in {time.perf_counter() - began:.1f} s of host time", flush=True)
    return _verified(stages, program, chip, arrays) if options.verify else 0


def make_step(options: Options, sizes: Sizes, prefix: Path) -> tuple[Step, list[np.ndarray]]:
    """The step, traced from shapes, and, if it is to be verified, its inputs; weights, inputs and the jaxpr are written."""
    subject = options.subject()
    batch = subject.batch(sizes, np.random.default_rng(options.seed))
    made = tpuflow.training_step(
        subject.model(sizes), batch, policy=options.policy, optimizer=optax.sgd(options.lr), loss=subject.loss_of(options.loss),
        seed=options.seed,
    )  # fmt: skip
    state, take_step, names = made.state, made.step, (leaf_names(made.state), names_of(batch, pair=True))
    parts = [[_on_host(leaf) for leaf in jax.tree.leaves(tree)] for tree in (state, batch)]
    for kind, of_part, arrays in zip(("weights", "inputs"), names, parts, strict=True):
        write_arrays(f"{prefix}.{kind}.npz", storable(dict(zip(of_part, arrays, strict=True))))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    arrays = [array for part in parts for array in part] if options.verify else []
    del made, state, parts  # of a large model the compiler would else have less memory to work in
    closed, out = jax.make_jaxpr(take_step, return_shape=True)(shapes, batch)
    Path(f"{prefix}.jaxpr").write_text(f"{closed}\n", encoding="utf-8")
    outputs = (*leaf_names(out[0]), *leaf_names(out[1]))
    return Step(closed, (*names[0], *names[1]), outputs, len(names[0])), arrays


def listing(folder: Path) -> str:
    """The files of a folder with their sizes in bytes."""
    return "\n".join(f"{path.stat().st_size:>14,}  {path.name}" for path in sorted(folder.iterdir()))


def _verified(stages: Sequence[Stage], program: Program, chip: Chip, arrays: Sequence[np.ndarray]) -> int:
    difference = first_difference(stages, program, chip, arrays)
    print(difference or f"verified: {len(stages)} stages and the device compute the same bits", flush=True)
    return 0 if difference is None else 1


def _on_host(leaf: Any) -> np.ndarray:
    """A leaf as the device takes it: random keys as their words."""
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def _folder(path: Path) -> Path:
    """The folder to write to, made if it is not there.

    Raises:
      ConfigError: it is no folder, not empty, or cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--out {path}: the folder is not empty; expected an empty one or none. Empty it, or give another path.")
        probe = path / MANIFEST
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror}). Give a folder that can, or one to make.") from error
    return path


def _write_manifest(folder: Path, name: str, options: Options, sizes: Sizes, stages: Sequence[str], program: Program) -> None:
    modelled, memory = time_program(program), memory_analysis(program)
    content = {
        "name": name,
        "model": options.model,
        "chip": program.chip.name,
        "policy": options.policy,
        "loss": options.loss or options.subject().loss,
        "optimizer": f"sgd({options.lr:g})",
        "seed": options.seed,
        "dropout": options.dropout,
        "batch": {size: value for size in ("batch", "image_size", "sequence") if (value := getattr(sizes, size))},
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "code_sha256": code_hash(program),
        "stages": list(stages),
        "ports": {kind: len(getattr(program, kind)) for kind in ("inputs", "outputs")},
        "memory_bytes": {
            **{kind: getattr(memory, f"{kind}_size_in_bytes") for kind in MEMORY},
            "peak": memory.peak_memory_in_bytes,
            "buffers": len(program.buffers),
        },
        "modelled": cost_analysis(program, modelled),
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASHED_AT_ONCE):
            digest.update(chunk)
    return digest.hexdigest()
