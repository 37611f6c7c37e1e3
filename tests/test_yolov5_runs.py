"""`python -m train yolov5` on a few drawn pictures: its files, a training that is taken up again, and the step beside plain jax.jit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import optax
import pytest
import yaml

import tpuflow
from bench import yolov5_numerics
from models.mlp import MLP
from models.yolov5 import TORCH_LAYERS, YOLOv5
from tests.killed_recipe import kill_training
from tests.test_yolov5 import NARROW, a_batch, cfg
from tpuflow.importers import load_state_dict, state_dict
from train.__main__ import main
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.optimizer import make_optimizer
from train.detection.results import read_results
from train.detection.schedules import Plan
from train.yolov5 import EMA

pytestmark = pytest.mark.slow
pytest.importorskip("cv2", reason="pip install 'tpuflow[detection]'")

EPOCHS = 2
TORCH_STEPS = 4
"""Each an update: with two pictures at 64 pixels, normalisations of few numbers magnify what is rounded."""
WRITTEN = {
    "F1_curve.png", "PR_curve.png", "P_curve.png", "R_curve.png", "checkpoints", "confusion_matrix.png", "hyp.yaml", "opt.yaml",
    "results.csv", "results.png", "train_batch0.jpg", "val_batch0_labels.jpg", "val_batch0_pred.jpg", "weights",
}  # fmt: skip


def test_a_training_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    from tests.detection_sets import write_set

    data = write_set(tmp_path / "set", 5)
    (tmp_path / "narrow.yaml").write_text(yaml.safe_dump(cfg(depth_multiple=1 / 9, width_multiple=0.125)))
    given = ["yolov5", "--data", str(data), "--cfg", str(tmp_path / "narrow.yaml"), "--img", "64", "--batch-size", "2", "--epochs"]
    given += [str(EPOCHS), "--freeze", "2", "--engine", "reference", "--project", str(tmp_path), "--no-progress"]
    kept = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kill_training([*given, "--name", "killed"], kept)
    for name in ("last", "best"):  # as if it had been killed between the checkpoint and what is written from it
        (tmp_path / "killed" / "weights" / f"{name}.safetensors").unlink(missing_ok=True)
    assert main([*given, "--name", "whole"]) == 0
    assert main(["yolov5", "--resume", str(tmp_path / "killed"), "--no-progress"]) == 0
    whole, again = tmp_path / "whole", tmp_path / "killed"
    assert {path.name for path in whole.iterdir()} >= WRITTEN
    assert (whole / "results.csv").read_text() == (again / "results.csv").read_text()
    assert read_results(whole / "results.csv")["epoch"] == list(range(EPOCHS))
    for name in ("last", "best"):
        one, other = (load_state_dict(folder / "weights" / f"{name}.safetensors") for folder in (whole, again))
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one), name


@pytest.mark.torch
def test_a_step_on_the_device_is_that_of_plain_jax_and_several_are_pytorchs(torch: ModuleType) -> None:
    from train import torch_yolov5

    plan, loss = Plan(Hyperparameters(), 3, 64, 16), DetectionLoss(NARROW, Hyperparameters(), 64)
    batch = a_batch(NARROW, 64)
    made = tpuflow.training_step(
        YOLOv5(NARROW), batch, optimizer=make_optimizer("SGD", plan), loss_fn=detection_loss(loss), inputs=pixels, ema=EMA,
        accumulate_steps=plan.accumulation,
    )  # fmt: skip
    step = jax.jit(made.step)
    (here, figures), (there, found) = step(made.state, batch), tpuflow.jit(made.step)(made.state, batch)
    np.testing.assert_allclose(found.loss, figures.loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves((here.carried, here.ema)), jax.tree.leaves((there.carried, there.ema)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-3 * float(np.abs(a).max()))

    network = torch_yolov5.Network(NARROW).train()
    own = state_dict({"params": made.state.params, **made.state.carried}, TORCH_LAYERS)
    network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in own.items()}, strict=False)
    trained = torch_yolov5.train(network, [batch] * TORCH_STEPS, loss, plan, EMA)
    losses = [float(figures.loss)]
    for _ in range(1, TORCH_STEPS):
        here, figures = step(here, batch)
        losses.append(float(figures.loss))
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-4)
    for name, array in state_dict({"params": here.ema.params, **here.ema.carried}, TORCH_LAYERS).items():
        np.testing.assert_allclose(trained.average[name].numpy(), array, rtol=0, atol=0.02 * float(np.abs(array).max()), err_msg=name)


def test_the_page_of_numerics_says_what_two_trainings_lose() -> None:
    rng = np.random.default_rng(0)
    data = rng.random((16, 784)).astype(np.float32), rng.integers(0, 10, 16).astype(np.int32)
    options = {"optimizer": optax.sgd(1e-3), "loss": "softmax_cross_entropy", "batch_size": 8, "sink_size": 2, "numerics": 2}
    found = {policy: tpuflow.train(MLP(), data, policy=policy, progress=False, **options).numerics for policy in yolov5_numerics.POLICIES}
    text = yolov5_numerics.page(found)
    assert "--policy fp16 --numerics 2" in text and "## fp16: the step after 2" in text
    assert "of the parameter updates round to nothing" in text and "every kernel" in text and "Dense_0 kernel" in text
    lost = next(line for line in text.splitlines() if line.startswith("updates of every kernel that round to nothing"))
    wholly, mixed = (float(share.rstrip("%")) for share in lost.split()[-2:])
    assert mixed < wholly
