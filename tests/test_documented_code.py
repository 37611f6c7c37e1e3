"""Every piece of Python in the README and the guides runs as it stands there, given what its page takes for granted; no link is dead."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import tpuflow
from models import gpt2
from tpuflow.examples import data
from tpuflow.importers import load_state_dict, save_state_dict, state_dict
from train.diffusion.schedulers import DDIM

ROOT = Path(__file__).parents[1]
GUIDES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
ELSEWHERE = ("docs/errors.md", "docs/extending.md", "docs/pjrt.md", "docs/processes.md", "docs/walk.md")
"""Written from the code, or run, by tests of their own."""

Names = dict[str, Any]
Holds = Callable[[Names], Any]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 8)).astype(np.float32), RNG.integers(0, 3, 64).astype(np.int32)
TOKENS = RNG.integers(0, 61, (2, 6)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Page:
    """How the pieces of a page are run, one after the other: in an empty folder, with the names that the page takes for granted; after
    each, what must be true of all names, among them "printed", what the piece printed. `smaller`: what of the text is replaced, so that it
    does not take long."""

    given: Callable[[], Names]
    holds: tuple[Holds, ...]
    smaller: Mapping[str, str] = field(default_factory=dict)


class Classifier(nn.Module):
    """A small network for `X` and `Y`."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.relu(nn.Dense(16)(x)))


class VAE(nn.Module):
    """One with a method for each half."""

    def setup(self) -> None:
        """An encoder of mean and variance, a decoder."""
        self.encoder, self.decoder = nn.Dense(8), nn.Dense(8)

    def __call__(self, x: Any) -> Any:
        return self.decode(self.encode(x)[0])

    def encode(self, x: Any) -> Any:
        """Mean and logarithm of the variance."""
        return jnp.split(self.encoder(x), 2, axis=-1)

    def decode(self, x: Any) -> Any:
        """What is nearest to the image."""
        return self.decoder(x)


def _loss(params: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(Classifier().apply(params, batch[0]), batch[1]).mean()  # pyright: ignore


def _averaging_step(params: Any, batch: Any) -> Any:
    """A step of one lane of the axis "batch"."""
    loss, gradients = jax.value_and_grad(_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.lax.pmean(gradients, "batch")), loss


def _lanes(count: int) -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """Parameters and a batch, `count` lanes of each."""
    params = jax.tree.map(lambda p: jnp.stack([p] * count), Classifier().init(jax.random.key(0), X))
    return params, (X.reshape(count, -1, 8), Y.reshape(count, -1))


def _steps_of_axes(names: Names) -> Any:
    """The compiled step on one lane and the sink of two find the losses that JAX does; the next pieces' state is made."""
    _, found = names["step"](*_lanes(1))
    sunk = next(iter(names["loop"]))
    for losses, count in ((found, 1), (sunk.metrics[0], 2)):
        np.testing.assert_allclose(losses, jax.vmap(_averaging_step, axis_name="batch")(*_lanes(count))[1], rtol=1e-5)
    names["state"] = TrainState.create(apply_fn=None, params=Classifier().init(jax.random.key(0), X), tx=optax.sgd(0.1))
    return True


def _step_that_tells(names: Names) -> Any:
    names["step"] = tpuflow.jit(names["step"])
    names["state"], loss = names["step"](names["state"], names["batch"])
    return len(names["norms"]) == 1 and loss > 0


def _asks(names: Names) -> Any:
    return np.array_equal(tpuflow.jit(names["scaled"])(X[0]), 2 * np.sort(X[0]))


def _with_axes() -> Names:
    params, batch = _lanes(2)
    given = {"train_step": _averaging_step, "loss_of": _loss, "norms": [], "batch": (X, Y), "data": [batch], "state": params}
    return {**given, "jax": jax, "np": np, "next_scale": lambda: np.float32(2), "optax": optax, "tpuflow": tpuflow}


def _language_model() -> Names:
    config = gpt2.Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16, **gpt2.NO_DROPOUT)
    variables = gpt2.GPT2(config).init(jax.random.key(0), TOKENS)
    Path("gpt2").mkdir()
    Path("out").mkdir()
    Path("gpt2/config.json").write_text(json.dumps(config.to_json()))
    save_state_dict("gpt2/model.safetensors", state_dict(variables, gpt2.torch_layers(config)))

    result = SimpleNamespace(params=dict(variables)["params"])
    given = {"result": result, "tokens": TOKENS, "prompts": TOKENS, "mask": np.ones_like(TOKENS)}
    return {**given, "jax": jax, "json": json, "functools": functools, "tpuflow": tpuflow}


def _written_as_read(_: Names) -> Any:
    read, written = (load_state_dict(f"{folder}/model.safetensors") for folder in ("gpt2", "out"))
    return read.keys() == written.keys() and all(np.array_equal(read[name], written[name]) for name in read)


def _is_generated(names: Names) -> Any:
    found = names["run"](names["variables"], TOKENS, attention_mask=names["mask"], key=jax.random.key(0))
    return found.shape == (2, 4)


def _diffusion() -> Names:
    schedule = DDIM(num_train_timesteps=1000)
    latents, noise, output = RNG.normal(size=(3, 2, 4, 4, 4)).astype(np.float32)
    at = jax.tree.map(lambda rows: rows[0], schedule.steps(20))
    return {"schedule": schedule, "latents": latents, "noise": noise, "output": output, "timesteps": np.array([3, 900]), "at": at}


def _checked() -> Names:
    params = Classifier().init(jax.random.key(0), X[:1])["params"]
    return {"images": X, "labels": Y, "params": params, "MLP": Classifier, "optax": optax, "tpuflow": tpuflow}


def _training() -> Names:
    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    given = {"x": X, "y": Y, "x_test": X, "y_test": Y, "data": (X, Y), "images": X, "held_out": {"image": X}, "VAE": VAE}
    of_nnx = {"nnx": nnx, "nnx_model": model, "batches": [(X[:32], Y[:32])] * 3}
    return {**given, **of_nnx, "model": Classifier(), "jax": jax, "jnp": jnp}


def _starts_from_the_checkpoint(names: Names) -> Any:
    """The parameters that were read are trained ones, and their loss is what the training begins with."""
    loss = _loss({"params": names["params"]["params"]}, (X[:32], Y[:32]))
    np.testing.assert_allclose(names["result"].losses[0], loss, rtol=1e-5)
    return not np.array_equal(names["params"]["params"]["Dense_0"]["kernel"], names["variables"]["params"]["Dense_0"]["kernel"])


def _one_step_then_nnx(names: Names) -> Any:
    """The step's loss is the model's own in mixed precision; the next piece's objects are made."""
    np.testing.assert_allclose(names["figures"].loss, _loss({"params": names["made"].state.params}, (X, Y)), rtol=1e-2)
    names["model"] = model = names["nnx_model"]
    names["optimizer"] = nnx.Optimizer(names["model"], optax.sgd(0.1), wrt=nnx.Param)
    names["metrics"], names["before"] = nnx.MultiMetric(loss=nnx.metrics.Average("values")), np.asarray(model.kernel[...])
    return True


def _three_steps_of_nnx(names: Names) -> Any:
    moved = not np.array_equal(names["model"].kernel[...], names["before"])
    return moved and names["optimizer"].step[...] == 3 and int(names["metrics"].loss.count[...]) == 3


def _torch() -> Names:
    import torch

    import tpuflow.torch  # pyright: ignore[reportUnusedImport]

    triple = torch.library.custom_op("mylib::triple", lambda x: 3 * x, mutates_args=(), schema="(Tensor x) -> Tensor")
    triple.register_fake(torch.empty_like)
    torch.manual_seed(0)
    return {"x": torch.from_numpy(X), "y": torch.from_numpy(Y).long(), "operation": triple, "torch": torch, "tpuflow": tpuflow}


def _computes_what_eager_does(names: Names) -> Any:
    """Trained for three steps, the compiled model gives what the same parameters give in eager PyTorch, but for mixed precision."""
    names["model"].eval()
    found, expected = names["compiled"](names["x"]).detach().numpy(), names["model"](names["x"]).detach().numpy()
    names["model"].train()
    np.testing.assert_allclose(found, expected, atol=5e-3)
    return True


def _megatron(names: Names) -> Any:
    np.testing.assert_allclose(names["y"], jax.nn.gelu(names["x"] @ names["w1"]) @ names["w2"], rtol=1e-2)
    return names["y"].shape == (32, 64) and "collectives 1: " in names["printed"]


def _partitioned(names: Names) -> Any:
    """Its weights were ones, all alike: a loss and a step that can be written down."""
    hidden = jax.nn.gelu(jnp.ones(()))
    np.testing.assert_allclose(names["loss"], hidden**2, rtol=1e-2)
    kinds = [line.split()[0] for line in names["printed"].splitlines()]
    return set(kinds) == {"all_reduce"}


def _by_rules(names: Names) -> Any:
    inputs = {port.name: port.cut for port in names["result"].executables[0].program.inputs}
    return np.isfinite(names["result"].losses).all() and inputs["params/Dense_0/kernel"] == ((), (1,))


def _three_sinks(names: Names) -> Any:
    """On the images that come with the repository, which are as many as 16 batches: 3 sinks of 10 steps."""
    lines = names["printed"].splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch: 1/10", "epoch: 2/10", "epoch: 3/10"]
    assert all(2.0 < float(line.rpartition(" ")[2]) < 2.6 for line in lines)
    return names["sunk"].step == 30 and names["sunk"].metrics.shape == (10,)


def _optimizer_leaves_hbm(names: Names) -> Any:
    """The step takes longer, HBM holds less at its peak, and the host two moments of 20 million parameters."""
    here, there = ([float(n) for n in line.split()] for line in names["printed"].splitlines()[-2:])
    return here[0] < there[0] and there[1] < here[1] and here[2] == 0 and there[2] > 8 * 20e6


def _tripled(names: Names) -> Any:
    found = names["torch"].compile(lambda x: names["operation"](x), backend="tpuflow")(names["x"])
    return np.array_equal(found.numpy(), 3 * X)


def _is_close_to_jax(names: Names) -> Any:
    found, expected = map(float, names["printed"].split()[:2])
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    return names["compiled"].memory_analysis().peak_memory_in_bytes > 0


PAGES: Mapping[str, Page] = {
    "README.md": Page(
        dict,
        (
            lambda n: np.isfinite(n["result"].losses).all() and "epoch 1: loss" in n["printed"],
            lambda n: Path("step.tpx").stat().st_size and "modelled_seconds" in n["printed"],
        ),
        {"epochs=5": "epochs=1"},
    ),
    "docs/diffusion.md": Page(_diffusion, (lambda n: len(n["tables"].timestep) == 20 and n["latents"].shape == n["noisy"].shape,)),
    "docs/jax.md": Page(_with_axes, (_steps_of_axes, _step_that_tells, _asks, lambda n: len(n["norms"]) == 2)),
    "docs/language_models.md": Page(
        _language_model, (_written_as_read, _is_generated), {"new_tokens=64": "new_tokens=4"}
    ),
    "docs/meshes.md": Page(dict, (_megatron, _partitioned, _by_rules)),
    "docs/numerics.md": Page(_checked, (lambda n: "fp16" in str(n["both"]["fp16"]) and Path("numerics.json").stat().st_size,)),
    "docs/chips.md": Page(dict, (lambda n: 1.2 < n["times"]["tpu-v5e"] / n["times"][n["faster"]] < 2,)),
    "docs/from_mindspore.md": Page(dict, (lambda n: n["printed"].splitlines()[-1] == "20",)),
    "docs/from_pytorch.md": Page(dict, (lambda n: n["result"].losses[-1] < n["result"].losses[0],)),
    "docs/precision.md": Page(
        dict, (lambda n: abs(n["losses"]["mixed"][-1] - n["losses"]["fp32"][-1]) < 0.01, lambda n: "round to nothing" in n["printed"])
    ),
    "docs/several_chips.md": Page(dict, (lambda n: float(n["printed"].split()[-1]) < 1e-5,)),
    "docs/start.md": Page(dict, (lambda n: "epoch 3: loss" in n["printed"], lambda n: n["verdict"].ok)),
    "docs/time_and_memory.md": Page(
        dict,
        (
            lambda n: n["estimate"].fits and n["printed"].splitlines()[-1].endswith("True"),
            lambda n: "copies between HBM and the host" in n["printed"] and n["printed"].split()[-1] == str(8 * 2 * 65536 * 1024),
            _optimizer_leaves_hbm,
        ),
    ),
    "docs/timing.md": Page(
        dict, (lambda n: "on tpu-v3, mine.toml, else fit to" in n["printed"] and n["estimate"].step_seconds > 64 * 785 * 4 / 250e6,)
    ),
    "docs/your_code.md": Page(
        dict, (_is_close_to_jax, lambda n: n["losses"][-1] < n["losses"][0], lambda n: 0 < float(n["printed"]) < 0.1)
    ),
    "docs/sink.md": Page(dict, (_three_sinks,), {"size=100": "size=10", "epochs=10": "epochs=3"}),
    "docs/torch.md": Page(_torch, (_computes_what_eager_does, _tripled, lambda n: np.isfinite(n["result"].losses).all())),
    "docs/training.md": Page(
        _training,
        (
            lambda n: Path("curves.png").stat().st_size,
            lambda n: Path("runs/vae").exists() and "divergence" in str(n["result"].history[0]),
            _starts_from_the_checkpoint,
            _one_step_then_nnx,
            _three_steps_of_nnx,
        ),
        {"epochs=20": "epochs=2", "eval_steps=500": "eval_steps=2", "every_steps=200": "every_steps=2"},
    ),
}  # fmt: skip


def pieces(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def test_every_page_with_python_is_run() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in GUIDES if "```python" in path.read_text(encoding="utf-8")}
    assert found == {*PAGES, *ELSEWHERE}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.S)):
        if not re.match(r"\w+:", link):
            name, _, place = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name}: {link}"
            assert not place or place in headings(target), f"{path.name}: {link}"


def headings(path: Path) -> set[str]:
    """The places of a page that a link may name, by GitHub's rule."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def run(page: str, how: Page) -> None:
    """Run all pieces of a page."""
    names, texts = how.given(), pieces(page)
    assert len(texts) == len(how.holds), f"{page} has {len(texts)} pieces of Python"
    assert all(any(old in text for text in texts) for old in how.smaller), f"{page} does not say what is to be made smaller"
    for number, (text, holds) in enumerate(zip(texts, how.holds, strict=True), 1):
        for old, new in how.smaller.items():
            text = text.replace(old, new)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, f"{page}, piece {number}", "exec"), names)
        names["printed"] = printed.getvalue()
        assert holds(names), f"{page}, piece {number}"


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, where the data sets are those that come with the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", lambda name, pixels=False: data.load_embedded(pixels=pixels))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.torch] * (page == "docs/torch.md")) for page in PAGES])
def test_the_python_of_a_page_runs_and_does_what_it_says(page: str) -> None:
    run(page, PAGES[page])
