"""ResNet-50 beside PyTorch, one training step: `python -m train.parity resnet50` compares logits, loss, statistics and every gradient.

Both start from the weights that PyTorch draws from seed 0 and see the same CIFAR-10 images. fp32 sums in different orders differ, and fifty
layers of ReLU and batch normalisation amplify the difference, so a gradient is judged by its distance from a float64 run, beside that of
PyTorch's own fp32.

Under fp16 and bf16 policies the same distances are stated, of a network whose blocks end with a scale of 1/4. With PyTorch's 1, rounding
errors of the gradients grow to a hundred thousand times their size on the way back (1 % in fp32, PyTorch's own included), so that short
types show nothing but noise; with the 0 of MindSpore's guide, most gradients of the first step are zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import tpuflow
from models import resnet
from tpuflow.examples.data import ImageData
from tpuflow.importers import flax_params
from train import cifar10, transforms
from train.published import exit_status, judged

BATCH, SIDE, CLASSES = 4, 224, 10
STATE_BOUND = 1e-4
"""Relative difference of logits, loss and statistics from PyTorch's fp32."""

GRADIENT_RATIO = 3.0
"""How many times PyTorch's own fp32 error of a gradient ours may be, both against float64."""

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "O2": {"loss_scale": 1024.0},
    "O3": {"loss_scale": 1024.0},
    "mixed": {"loss_scale": 1024.0},
    "mixed_bf16": {},
}
"""Policy -> how it is trained: with the scale of the guide, since the first steps of a larger one overflow and are skipped."""

LAST_SCALE = 0.25
"""The scale at the end of every block, for short types."""

Arrays = tuple[np.ndarray, np.ndarray]
Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What one training step gives: logits [B, classes], the loss, and by Flax path the new batch statistics and the gradients."""

    logits: np.ndarray
    loss: float
    statistics: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]


def batch_of(images: ImageData, side: int, count: int = BATCH) -> Arrays:
    """The first training images as the recipe sees them, without crops and flips: float32 [count, side, side, 3], int32 [count]."""
    steps = transforms.resnet_evaluation(side)
    return transforms.apply(steps, images.train[0][:count], np.random.default_rng(0)), images.train[1][:count]


class Twin:
    """ResNet-50 in PyTorch with the weights of seed 0, and the Flax model with the same.

    `last_scale`: what every block's last normalisation is set to; PyTorch's 1 if not given.
    """

    def __init__(self, last_scale: float = 1.0) -> None:
        import torch

        from train.torch_models import ResNet

        torch.manual_seed(0)
        self.model = resnet.resnet50(CLASSES)
        epsilon = self.model.style.epsilon
        self._network = ResNet(self.model.stages, bottleneck=True, classes=CLASSES, even=False, epsilon=epsilon)
        with torch.no_grad():
            for name, parameter in self._network.named_parameters():
                if name.endswith("bn3.weight"):
                    parameter.fill_(last_scale)
        self._like = jax.eval_shape(self.model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, SIDE, SIDE, 3), np.float32))
        self.variables = self._as_flax({name: tensor.numpy().copy() for name, tensor in self._network.state_dict().items()})

    def step(self, batch: Arrays, dtype: str = "float32", threads: int | None = None) -> Step:
        """One step of a fresh copy of the PyTorch network."""
        import copy

        import torch

        from train.torch_training import Setting, applied, gradients, images_of

        network = copy.deepcopy(self._network).to(getattr(torch, dtype)).train()
        with applied(Setting(getattr(torch, dtype), threads)):
            logits = network(images_of(batch[0], getattr(torch, dtype)))
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch[1].astype(np.int64)))
            loss.backward()
        state = {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}
        found = self._as_flax({**state, **gradients(network)})
        return Step(logits.detach().numpy(), loss.item(), flat(found["batch_stats"]), flat(found["params"]))

    def _as_flax(self, state: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """A state dict in Flax's tree and axes, in the types it has."""
        wide = any(array.dtype == np.float64 for array in state.values())
        like = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), np.float64 if wide else leaf.dtype), leaf.shape), self._like)
        return flax_params(state, like, resnet.torch_layers(self.model))


def flat(tree: Tree) -> dict[str, np.ndarray]:
    """Path -> array, as float64."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf).astype(np.float64) for path, leaf in leaves}


def recording() -> optax.GradientTransformation:
    """An optimizer that moves nothing: its state is the gradients of the last step."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: g * 0.0, updates), updates

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p: p * 0.0, params), update)


def our_step(twin: Twin, batch: Arrays, policy: str = "fp32", **options: Any) -> Step:
    """The step on the simulated device, through `tpuflow.train`; the logits by the same forward pass.

    `options`: more arguments of `tpuflow.train`.
    """
    result = tpuflow.train(
        twin.model, batch, policy=policy, optimizer=recording(), loss="softmax_cross_entropy", batch_size=len(batch[0]),
        params=twin.variables["params"], progress=False, **options,
    )  # fmt: skip
    logits = training_logits(twin, batch, policy)
    return _step(logits, result.losses[0], result.carried["batch_stats"], gradients_of(result.opt_state, twin))


def training_logits(twin: Twin, batch: Arrays, policy: str) -> Any:
    """The logits of a training step, which normalises by the batch's own statistics, computed on the device under the policy."""
    made = tpuflow.training_step(twin.model, batch, policy, params=twin.variables["params"])
    return tpuflow.jit(made.outputs)(made.state, batch)


def gradients_of(opt_state: Any, twin: Twin) -> Tree:
    """The recorded gradients, wherever the optimizer's state has them."""
    tree = jax.tree.structure(twin.variables["params"])

    def is_gradients(node: Any) -> bool:
        return jax.tree.structure(node) == tree

    return next(node for node in jax.tree.leaves(opt_state, is_leaf=is_gradients) if is_gradients(node))


def jax_step(twin: Twin, batch: Arrays) -> Step:
    """The step by plain `jax.jit`, in fp32."""
    model = twin.model

    def loss_of(params: Any, statistics: Any, batch: Any) -> Any:
        logits, new = model.apply({"params": params, "batch_stats": statistics}, batch[0], train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), (logits, new["batch_stats"])

    compute = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, (logits, statistics)), grads = compute(twin.variables["params"], twin.variables["batch_stats"], batch)
    return _step(logits, float(loss), statistics, grads)


def _step(logits: Any, loss: float, statistics: Tree, gradients: Tree) -> Step:
    return Step(np.asarray(logits, np.float64), loss, flat(statistics), flat(gradients))


def error(found: np.ndarray, reference: np.ndarray) -> float:
    """|found - reference| / |reference|, by the Euclidean norm."""
    return float(np.linalg.norm(found - reference) / max(np.linalg.norm(reference), np.finfo(np.float64).tiny))


def errors(step: Step, reference: Step) -> dict[str, Any]:
    """The relative error of everything: of the worst statistic, and of every gradient."""
    return {
        "logits": error(step.logits, reference.logits),
        "loss": abs(step.loss - reference.loss) / abs(reference.loss),
        "statistics": max(error(step.statistics[name], array) for name, array in reference.statistics.items()),
        "gradients": {name: error(step.gradients[name], array) for name, array in reference.gradients.items()},
    }


def gradient_ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Our error over PyTorch's, for every gradient tensor."""
    return {name: ours[name] / max(value, np.finfo(np.float64).tiny) for name, value in theirs.items()}


def report(images: ImageData, *, side: int = SIDE, policies: Sequence[str] = tuple(POLICIES), beside_jit: bool = True) -> dict[str, Any]:
    """Every error, and "failed": how many bounds do not hold. `beside_jit`: the errors of plain `jax.jit`, too, which no bound judges."""
    twin, batch = Twin(), batch_of(images, side)
    exact, theirs, ours = twin.step(batch, "float64"), twin.step(batch), our_step(twin, batch)
    beside = errors(ours, theirs)
    plain = {"jax.jit": errors(jax_step(twin, batch), exact)} if beside_jit else {}
    against = {"PyTorch": errors(theirs, exact), **plain, "ours": errors(ours, exact)}
    ratios = gradient_ratios(against["ours"]["gradients"], against["PyTorch"]["gradients"])
    short = short_types(batch, policies) if policies else {}
    failed = sum(not beside[what] <= STATE_BOUND for what in ("logits", "loss", "statistics"))
    failed += sum(not ratio <= GRADIENT_RATIO for ratio in ratios.values())
    return {
        "side": side, "batch": BATCH, "failed": failed, "beside PyTorch": beside, "against float64": against | short, "ratios": ratios
    }  # fmt: skip


def short_types(batch: Arrays, policies: Sequence[str]) -> dict[str, Any]:
    """The errors against float64 under fp16 and bf16 policies, and those of fp32 in the same network."""
    twin = Twin(LAST_SCALE)
    exact = twin.step(batch, "float64")
    found = {policy: errors(our_step(twin, batch, policy, **POLICIES[policy]), exact) for policy in policies}
    return {"PyTorch, 1/4": errors(twin.step(batch), exact), **found}


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = [f"ResNet-50, batch {figures['batch']} at {figures['side']}x{figures['side']}: relative errors"]
    lines.append(f"{'':24} {'logits':>9} {'loss':>9} {'statistics':>10} {'gradients: median':>18} {'largest':>9}")
    rows = {"ours - PyTorch": figures["beside PyTorch"], **{f"{k} - exact": v for k, v in figures["against float64"].items()}}
    for name, row in rows.items():
        grads = list(row["gradients"].values())
        cells = f"{row['logits']:9.1e} {row['loss']:9.1e} {row['statistics']:10.1e} {np.median(grads):18.1e} {max(grads):9.1e}"
        lines.append(f"{name:24} {cells}")
    ratios = figures["ratios"]
    worst = max(ratios, key=lambda name: ratios[name])
    lines.append(f"gradient error over PyTorch's: median {np.median(list(ratios.values())):.2f}, largest {ratios[worst]:.2f} ({worst})")
    return "\n".join([*lines, f"{figures['failed']} bounds fail (state {STATE_BOUND:g}, gradients {GRADIENT_RATIO:g} times PyTorch's)"])


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print, write JSON; 0 if every bound holds, 1 if one fails, 2 if there are no data, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.parity resnet50", description=__doc__)
    parser.add_argument("--side", type=int, default=SIDE, help="height and width of the images [%(default)s]")
    parser.add_argument(
        "--policies", nargs="*", default=tuple(POLICIES), choices=tuple(POLICIES), help="short types to state the errors of [all]"
    )
    parser.add_argument("--data-dir", type=Path, help="folder of the data; else $TPUFLOW_DATA, the user's cache, a download")
    parser.add_argument("--json", type=Path, default=Path("parity_resnet50.json"), metavar="FILE", help="[%(default)s]")
    options = parser.parse_args(argv)

    def make() -> dict[str, Any]:
        return report(cifar10.load(options.data_dir), side=options.side, policies=options.policies)

    return exit_status(lambda: judged(make(), table, options.json), options.json)
