"""Public training steps beside plain JAX: `python -m bench.conformance CHECKOUT` runs those of flax's examples that it finds in a checkout.

Each example's own `train_step` runs a few steps on made-up data under `jax.jit` (`jax.pmap`, `nnx.jit`) and under tpuflow's, from the same
state, in a process of its own; what it measures and the parameters afterwards are put side by side. Packages that only its input pipeline
and its logs need, and that are not installed, are replaced by stand-ins. Nothing of the checkout is copied.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.machinery
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.sections import put_section

STEPS = 3
CLOSE = 1e-3
"""Relative: of what a step measures."""
STAND_INS = ("clu", "ml_collections", "tensorflow", "tensorflow_datasets", "tensorboard", "tensorflow_text", "sentencepiece")


class _Anything:
    """Stands for whatever a missing package has: can be called, subclassed, indexed, and has every attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return other

    def __ror__(self, other: Any) -> Any:
        return other

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


class _StandIn(types.ModuleType):
    """A module of which nothing is known."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder:
    """Finds stand-ins, after everything else was looked for."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a stand-in, for the packages that may have one."""
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True) if name.split(".")[0] in STAND_INS else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> types.ModuleType:
        """An empty module."""
        return _StandIn(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Nothing to run."""


@dataclass(frozen=True)
class Prepared:
    """A step (state, *rest) -> state, or (state, measured); `under`: what it is made for."""

    step: Callable[..., Any]
    state: Any
    rest: tuple[Any, ...]
    under: str = "jit"


def _imagenet(train: Any) -> Prepared:
    import jax

    models = importlib.import_module("models")
    config = types.SimpleNamespace(half_precision=False, momentum=0.9, warmup_epochs=1, num_epochs=3)
    rate = train.create_learning_rate_fn(config, 0.1, 2)
    model = models.ResNet(stage_sizes=[1, 1], block_cls=models.ResNetBlock, num_classes=1000, num_filters=8, dtype=np.float32)
    state = train.create_train_state(jax.random.key(0), config, model, 32, rate)
    batch = {"image": _floats(4, 32, 32, 3), "label": _integers(1000, 4)}
    return Prepared(functools.partial(train.train_step, learning_rate_fn=rate), state, (batch,), "pmap")


def _nlp_seq(train: Any) -> Prepared:
    import jax
    import optax

    models = importlib.import_module("models")
    config = models.TransformerConfig(40, 20, emb_dim=16, num_heads=2, num_layers=1, qkv_dim=16, mlp_dim=32, max_len=12)
    model, rate = models.Transformer(config), optax.constant_schedule(0.05)
    batch = {"inputs": _integers(40, 4, 12), "targets": _integers(20, 4, 12)}
    params = model.init(jax.random.key(0), inputs=batch["inputs"], train=False)["params"]
    state = train.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(rate, 0.9))
    step = functools.partial(train.train_step, model=model, learning_rate_fn=rate)
    return Prepared(lambda s, b, key: step(s, b, dropout_rng=key), state, (batch, jax.random.key(1)), "pmap")


def _wmt(train: Any) -> Prepared:
    import jax
    import optax

    models = importlib.import_module("models")
    config = models.TransformerConfig(40, 40, emb_dim=16, num_heads=2, num_layers=1, qkv_dim=16, mlp_dim=32, max_len=12)
    rate = optax.constant_schedule(0.05)
    batch = {"inputs": _integers(40, 4, 12), "targets": _integers(40, 4, 12)}
    variables = models.Transformer(config).init(
        {"params": jax.random.key(0), "dropout": jax.random.key(2)}, batch["inputs"], batch["targets"]
    )
    made = getattr(train, "TrainState", train.train_state.TrainState)
    extra = {"dynamic_scale": None} if hasattr(train, "TrainState") else {}
    state = made.create(apply_fn=None, params=variables["params"], tx=optax.sgd(rate, 0.9), **extra)
    step = functools.partial(train.train_step, config=config, learning_rate_fn=rate, label_smoothing=0.1)
    return Prepared(lambda s, b, key: step(s, b, dropout_rng=key), state, (batch, jax.random.key(1)), "pmap")


def _vae(train: Any) -> Prepared:
    import jax
    import optax

    model = importlib.import_module("models").model(8)
    images, key = np.asarray(_floats(4, 784) > 0, np.float32), jax.random.key(0)
    params = model.init(key, images, key)["params"]
    state = train.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-4))
    return Prepared(functools.partial(train.train_step, latents=8), state, (images, jax.random.key(1)))


def _mnist(train: Any) -> Prepared:
    import optax
    from flax import nnx

    model = train.CNN(rngs=nnx.Rngs(0))
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    batch = {"image": _floats(4, 28, 28, 1), "label": _integers(10, 4)}
    return Prepared(train.train_step.__wrapped__, (model, optimizer, metrics), (batch, nnx.Rngs(1)), "nnx")


def _seq2seq(train: Any) -> Prepared:
    import jax
    from absl import flags

    flags.FLAGS(["conformance"])
    table = train.CTable("0123456789+= ")
    flags.FLAGS.hidden_size = 16
    state = train.get_train_state(jax.random.key(0), table)
    batch = table.get_batch(4)
    step = functools.partial(train.train_step.__wrapped__, eos_id=table.eos_id)
    return Prepared(step, state, (batch, jax.random.key(1)))


EXAMPLES: dict[str, Callable[[Any], Prepared]] = {
    "imagenet": _imagenet, "mnist": _mnist, "nlp_seq": _nlp_seq, "seq2seq": _seq2seq, "vae": _vae, "wmt": _wmt,
}  # fmt: skip
"""Folder in examples/ -> how its step is set up, small enough for a few seconds."""


def measure(checkout: Path, name: str) -> dict[str, Any]:
    """One example: the largest relative difference of what it measures, of its parameters, and how long it took to say so."""
    sys.path.insert(0, str(checkout / "examples" / name))
    sys.meta_path.append(_Finder)  # type: ignore[arg-type]
    made = [EXAMPLES[name](importlib.import_module("train")) for _ in range(2)]
    if made[0].under == "nnx":
        return _nnx_steps(made)
    (plain, ours), (state, rest) = _compiled(made[0]), (made[0].state, made[0].rest)
    return _compared(*(_run(f, state, rest, pmapped=made[0].under == "pmap") for f in (plain, ours)))


def _compiled(made: Prepared) -> tuple[Callable[..., Any], Callable[..., Any]]:
    import jax

    import tpuflow

    if made.under == "pmap":
        mapped = jax.pmap(made.step, axis_name="batch")
        return mapped, tpuflow.jit(mapped)
    return jax.jit(made.step), tpuflow.jit(made.step)


def _run(step: Callable[..., Any], state: Any, rest: tuple[Any, ...], *, pmapped: bool) -> tuple[list[Any], Any]:
    """(what each step measures, the last state)."""
    import jax

    if pmapped:
        state, rest = jax.tree.map(lambda x: x[None] if hasattr(x, "shape") else np.asarray(x)[None], (state, rest))
    measured = []
    for _ in range(STEPS):
        found = step(state, *rest)
        state, figures = found if isinstance(found, tuple) and not hasattr(found, "params") else (found, {})
        measured.append(jax.tree.map(np.asarray, figures))
    return measured, jax.tree.map(np.asarray, state.params)


def _nnx_steps(made: Sequence[Prepared]) -> dict[str, Any]:
    from flax import nnx

    import tpuflow

    results = []
    for prepared, jit in zip(made, (nnx.jit, tpuflow.nnx.jit), strict=True):
        step, measured = jit(prepared.step), []
        for _ in range(STEPS):
            step(*prepared.state, *prepared.rest)
            measured.append({name: np.asarray(value) for name, value in prepared.state[2].compute().items()})
        results.append((measured, nnx.to_pure_dict(nnx.state(prepared.state[0], nnx.Param))))
    return _compared(*results)


def _compared(plain: tuple[list[Any], Any], ours: tuple[list[Any], Any]) -> dict[str, Any]:
    return {"measured": _difference(plain[0], ours[0]), "parameters": _difference(plain[1], ours[1])}


def _difference(plain: Any, ours: Any) -> float | None:
    """The largest difference of two trees, each array's relative to its largest element (at least a hundredth of the largest of all); None
    if there is nothing in them. Without that floor, noise in a gradient that is zero (a bias before a normalisation) would be all one sees.
    """
    import jax

    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(*map(jax.tree.leaves, (plain, ours)), strict=True)]
    largest = [float(np.max(np.abs(a), initial=0.0)) for a, _ in pairs]
    floor = max([1e-6, *(0.01 * n for n in largest)])
    return max((float(np.max(np.abs(a - b), initial=0.0)) / max(n, floor) for (a, b), n in zip(pairs, largest, strict=True)), default=None)


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _integers(below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, below, shape).astype(np.int32)


def rows(checkout: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each example that the checkout has, and its figures; or the last line of what went wrong."""
    for name in EXAMPLES:
        if (checkout / "examples" / name / "train.py").is_file():
            command = [sys.executable, "-m", "bench.conformance", str(checkout), "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]
            yield name, json.loads(last) if done.returncode == 0 else last


def agrees(figures: dict[str, Any] | str) -> bool:
    """Whether an example ran and nothing differs by more than is stated."""
    return not isinstance(figures, str) and all(value is None or value <= CLOSE for value in figures.values())


def page(found: Sequence[tuple[str, dict[str, Any] | str]]) -> str:
    """The section of docs/conformance.md."""
    lines = [
        f"The `train_step` of flax's own examples, {STEPS} steps under `jax.jit`, `jax.pmap` or `nnx.jit` and tpuflow's, from one state.",
        "Written by `make conformance EXAMPLES=path` for a folder with flax's checkout. Differences are relative to the largest element.",
        "",
        "| example | what it measures | parameters | |",
        "|---|---|---|---|",
    ]
    for name, figures in found:
        shown = ("", "") if isinstance(figures, str) else [_text(figures[column]) for column in ("measured", "parameters")]
        verdict = "agrees" if agrees(figures) else figures if isinstance(figures, str) else "differs"
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {verdict} |")
    return "\n".join(lines) + "\n"


def _text(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.1e}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the checkout has and write the page; 0 if every example agrees, 1 if one does not, 2 if there is none."""
    parser = argparse.ArgumentParser(prog="python -m bench.conformance", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of flax")
    parser.add_argument("--one", choices=EXAMPLES, help="this example alone, as JSON")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/conformance.md"), help="[%(default)s]")
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(measure(given.checkout, given.one)))
        return 0
    found = list(rows(given.checkout))
    if not found:
        print(f"{given.checkout}: no examples/*/train.py of flax's found; there are rows for {', '.join(EXAMPLES)}.", file=sys.stderr)
        return 2
    put_section(given.output, "Public training steps", page(found))
    print(page(found))
    return 0 if all(agrees(figures) for _, figures in found) else 1


if __name__ == "__main__":
    sys.exit(main())
