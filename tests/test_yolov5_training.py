"""YOLOv5's training: schedules and optimizer as the release's loop has them, hyperparameters, weights from its checkpoints, options."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from dataclasses import replace
from pathlib import Path, PosixPath
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import tpuflow
from models.yolov5 import TORCH_LAYERS, YOLOv5
from models.yolov5_config import P5, P6, P6_ANCHORS, Config
from tpuflow.errors import ConfigError, WeightsError
from tpuflow.importers import flax_params, load_state_dict, save_state_dict, state_dict
from train.__main__ import main
from train.detection.evaluation_batches import stride_for
from train.detection.hyperparameters import Hyperparameters, read_hyperparameters
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.optimizer import make_optimizer
from train.detection.run_files import write_settings
from train.detection.schedules import Plan
from train.detection.transfer import save_network, transfer
from train.detection.weights import config_of
from train.yolov5 import Yolov5Options, frozen, network_of, resumed

NARROW = Config(
    0.33, 0.125, classes=5, anchors=(((8, 9), (16, 31), (33, 23)), ((30, 61), (62, 45), (59, 119)), ((116, 90), (156, 198), (373, 326)))
)


# -- schedules


def loop(plan: Plan) -> list[tuple[int, float, float, float]]:
    """(step, rate of weights, rate of biases, momentum) of every update, told as the release's loop goes: step by step, epoch by epoch."""
    hyp, found, last, accumulate = plan.hyp, [], -1, max(round(64 / plan.batch_size), 1)
    rate = bias = hyp.lr0
    momentum = hyp.momentum
    for epoch in range(plan.epochs):
        if epoch:  # the scheduler has been asked once more than it had moved
            rate = bias = hyp.lr0 * float(plan.share(np.array(epoch - 1)))
        for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            if step <= plan.warmup_steps:
                along = [0, plan.warmup_steps]
                accumulate = max(1, np.interp(step, along, [1, 64 / plan.batch_size]).round())
                goal = hyp.lr0 * float(plan.share(np.array(epoch)))
                rate, bias = (float(np.interp(step, along, [first, goal])) for first in (0.0, hyp.warmup_bias_lr))
                momentum = float(np.interp(step, along, [hyp.warmup_momentum, hyp.momentum]))
            if step - last >= accumulate:
                found.append((step, rate, bias, momentum))
                last = step
    return found


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(("epochs", "steps", "batch"), [(3, 64, 2), (8, 60, 16), (30, 12, 64), (4, 200, 3), (5, 100, 128)])
def test_rates_momenta_and_updates_are_those_of_the_release_loop(epochs: int, steps: int, batch: int, cosine: bool) -> None:
    plan = Plan(Hyperparameters(), epochs, steps, batch, cosine)
    expected = np.array(loop(plan))
    np.testing.assert_array_equal(plan.updates, expected[:, 0])
    np.testing.assert_allclose(
        np.stack([plan.rates(), plan.rates(plan.hyp.warmup_bias_lr), plan.momenta()], 1), expected[:, 1:], rtol=1e-12
    )


def test_the_cosine_and_the_line_go_from_the_whole_rate_to_lrf() -> None:
    for cosine in (False, True):
        share = Plan(Hyperparameters(lrf=0.2), 10, 5, 16, cosine).share(np.array([0, 5, 10]))
        np.testing.assert_allclose(share, [1, 0.6, 0.2])


def test_the_decay_of_weights_goes_with_the_images_of_an_update() -> None:
    assert Plan(Hyperparameters(), 1, 1, 16).weight_decay == pytest.approx(5e-4)
    assert Plan(Hyperparameters(), 1, 1, 24).weight_decay == pytest.approx(5e-4 * 72 / 64)
    assert Plan(Hyperparameters(), 1, 1, 128).weight_decay == pytest.approx(1e-3)


# -- optimizer


@pytest.mark.torch
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_updates_are_those_of_pytorch_in_three_groups(torch: ModuleType, name: str) -> None:
    plan, rng = Plan(Hyperparameters(weight_decay=0.05), 8, 60, 16), np.random.default_rng(0)
    params = {"conv": {"kernel": rng.normal(size=(3, 4))}, "bn": {"scale": rng.normal(size=4), "bias": rng.normal(size=4)}}
    params = jax.tree.map(lambda a: a.astype(np.float32), params)
    tensors = [torch.tensor(a, requires_grad=True) for a in (params["bn"]["bias"], params["conv"]["kernel"], params["bn"]["scale"])]
    made = {
        "SGD": lambda: torch.optim.SGD(tensors[:1], lr=0.0, momentum=0.9, nesterov=True),
        "Adam": lambda: torch.optim.Adam(tensors[:1], lr=0.0, betas=(plan.hyp.momentum, 0.999)),
        "AdamW": lambda: torch.optim.AdamW(tensors[:1], lr=0.0, betas=(plan.hyp.momentum, 0.999), weight_decay=0.0),
    }[name]()
    made.add_param_group({"params": tensors[1:2], "weight_decay": plan.weight_decay})
    made.add_param_group({"params": tensors[2:], "weight_decay": 0.0})
    optimizer = make_optimizer(name, plan)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _, rate, bias, momentum in loop(plan)[:12]:
        gradients = jax.tree.map(lambda a: 8 * rng.normal(size=a.shape).astype(np.float32), params)
        for tensor, gradient in zip(tensors, (gradients["bn"]["bias"], gradients["conv"]["kernel"], gradients["bn"]["scale"]), strict=True):
            tensor.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_(tensors, max_norm=10.0)
        for number, group in enumerate(made.param_groups):
            group["lr"] = rate if number else bias
            group |= {"momentum": momentum} if "momentum" in group else {}
        made.step()
        changes, state = update(gradients, state, params)
        params = optax.apply_updates(params, changes)
    for tensor, leaf in zip(tensors, (params["bn"]["bias"], params["conv"]["kernel"], params["bn"]["scale"]), strict=True):
        np.testing.assert_allclose(leaf, tensor.detach().numpy(), rtol=1e-5, atol=1e-6)


# -- hyperparameters


def test_a_file_of_hyperparameters_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 0.02  # twice\nmosaic: 0\n")
    assert read_hyperparameters(path) == Hyperparameters(lr0=0.02, mosaic=0)
    assert read_hyperparameters(None) == Hyperparameters()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("momentun: 0.9", "'momentun' is no hyperparameter. Did you mean 'momentum'"),
        ("lr0: fast", "hyperparameter lr0: expected a number from 0 on, got 'fast'"),
        ("momentum: 1.5", "hyperparameter momentum: expected a number from 0 to 1, got 1.5"),
        ("anchors: 3", "anchors asks for new anchors .* take out that line"),
        ("- 3", "holds list, expected names and values"),
        ("lr0: [", "no YAML"),
        (None, "cannot be read .No such file"),
    ],
)
def test_a_file_that_holds_no_hyperparameters_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "hyp.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"--hyp {re.escape(str(path))}: .*{message}"):
        read_hyperparameters(path)


# -- weights


@pytest.fixture(scope="module")
def network() -> YOLOv5:
    """A narrow network."""
    return YOLOv5(NARROW)


@pytest.fixture(scope="module")
def variables(network: YOLOv5) -> Any:
    """Its variables: numbers that tell each array from the others."""
    shapes = jax.eval_shape(network.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float16).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def checkpoint(torch: ModuleType, variables: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as the release saves it in a training: the network pickled in half precision, beside numbers, paths and options."""
    from train import torch_yolov5

    made = torch_yolov5.Network(NARROW)
    named = {name: torch.from_numpy(np.array(array)) for name, array in state_dict(variables, TORCH_LAYERS).items()}
    made.load_state_dict(named, strict=False)
    made.yaml, made.names, made.stride = {"nc": 5, "depth_multiple": 0.33}, {0: "a"}, torch.tensor([8.0, 16.0, 32.0])
    path = tmp_path_factory.mktemp("weights") / "yolov5.pt"
    options = argparse.Namespace(data=PosixPath("data.yaml"), freeze=[0], device=torch.device("cpu"))
    torch.save(
        {"best_fitness": np.array([0.5]), "model": made.half(), "ema": None, "updates": None, "optimizer": None, "opt": options,
         "git": {"branch", "commit"}, "date": "2024-01-01T00:00:00"}, path,
    )  # fmt: skip
    return path


@pytest.mark.torch
def test_a_checkpoint_of_the_release_is_read_without_its_classes(checkpoint: Path, variables: Any, network: YOLOv5) -> None:
    state = load_state_dict(checkpoint)
    config = config_of(checkpoint, state)
    assert config == replace(NARROW, depth_multiple=3 / 9)
    assert jax.tree.all(jax.tree.map(np.array_equal, flax_params(state, variables, TORCH_LAYERS), variables))


class Asks:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *given: Any):
        self._call = function, given

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.torch
@pytest.mark.parametrize(
    ("function", "given", "named"),
    [(os.system, ("touch {}",), "posix.system"), (eval, ("open('{}', 'w')",), "builtins.eval"), (open, ("{}", "w"), "io.open")],
    ids=["system", "eval", "open"],
)
@pytest.mark.parametrize("place", ["model", "beside"])
def test_a_checkpoint_that_would_run_code_is_refused_and_runs_none(
    torch: ModuleType, tmp_path: Path, function: Any, given: tuple[str, ...], named: str, place: str
) -> None:
    path, trace = tmp_path / "forged.pt", tmp_path / "trace"
    forged = Asks(function, *(text.format(trace) for text in given))
    torch.save({"model": forged} if place == "model" else {"epoch": [forged], "model": {"a": torch.ones(1)}}, path)
    with pytest.raises(WeightsError, match=rf"forged.pt: refused: reading it would call {re.escape(named)}"):
        load_state_dict(path)
    assert not trace.exists()


def test_weights_go_into_a_network_of_other_classes_where_they_fit(variables: Any, network: YOLOv5) -> None:
    state = state_dict(variables, TORCH_LAYERS)
    fewer = {name: array for name, array in state.items() if not name.startswith("model.24.m.1")}
    fewer["model.24.m.0.bias"] = np.zeros(7, np.float32)
    own = jax.tree.map(np.zeros_like, variables)
    made = transfer(Path("w.pt"), fewer, network, own)
    assert made.kept == ("model.24.m.0.bias", "model.24.m.1.bias", "model.24.m.1.weight")
    assert str(made) == f"{len(state) - 3} of {len(state)} tensors; not {', '.join(made.kept)}"
    assert not made.variables["params"]["model_24"]["m_1"]["kernel"].any()
    np.testing.assert_array_equal(made.variables["params"]["model_0"]["conv"]["kernel"], variables["params"]["model_0"]["conv"]["kernel"])


def test_weights_of_nothing_that_fits_are_refused(variables: Any, network: YOLOv5) -> None:
    with pytest.raises(WeightsError, match=r"w.pt: no tensor has the name .* the file has fc.weight"):
        transfer(Path("w.pt"), {"fc.weight": np.zeros((2, 2), np.float32)}, network, variables)


def test_a_written_network_is_the_one_that_is_read(variables: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    save_network(path, NARROW, variables)
    state = load_state_dict(path)
    config = config_of(path, state)
    assert config.channels(64) == 8 and config.classes == 5
    np.testing.assert_allclose(config.anchors, NARROW.anchors)
    assert jax.tree.all(jax.tree.map(np.array_equal, flax_params(state, variables, TORCH_LAYERS), variables))


@pytest.mark.slow
def test_a_network_with_four_maps_comes_back_and_its_step_compiles(tmp_path: Path) -> None:
    config = replace(NARROW, anchors=P6_ANCHORS)
    shapes = jax.eval_shape(YOLOv5(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32))
    save_network(tmp_path / "p6.safetensors", config, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    read = config_of(tmp_path / "p6.safetensors", load_state_dict(tmp_path / "p6.safetensors"))
    np.testing.assert_allclose(read.anchors, P6_ANCHORS)
    made = tpuflow.estimate_training(
        YOLOv5(read),
        {
            "images": jax.ShapeDtypeStruct((1, 64, 64, 3), np.uint8),
            "boxes": jax.ShapeDtypeStruct((1, 2, 4), np.float32),
            "classes": jax.ShapeDtypeStruct((1, 2), np.int32),
            "valid": jax.ShapeDtypeStruct((1, 2), np.bool_),
        },
        optimizer=optax.sgd(0.01),
        loss_fn=detection_loss(DetectionLoss(read, Hyperparameters(), 64)),
        inputs=pixels,
    )
    assert made.fits


@pytest.mark.torch
def test_the_release_can_load_what_is_written(torch: ModuleType, variables: Any, tmp_path: Path) -> None:
    from train import torch_yolov5

    save_network(tmp_path / "last.pt", NARROW, variables)
    found = torch_yolov5.Network(NARROW).load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True), strict=False)
    assert not found.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in found.missing_keys)


# -- options


def test_frozen_layers_are_the_first_ones_or_those_that_are_listed() -> None:
    assert frozen((0,), P5.rows) == ()
    assert frozen((3,), P5.rows) == ("model_0/*", "model_1/*", "model_2/*")
    assert frozen((9, 11, 13), P5.rows) == ("model_9/*", "model_13/*")  # 11 has no parameters
    assert frozen((11, 13), P6.rows) == ("model_11/*",)
    with pytest.raises(ConfigError, match="--freeze: expected numbers from 0 to 25, got 26"):
        frozen((26,), P5.rows)


def test_the_side_of_frames_is_a_multiple_of_the_networks_stride() -> None:
    config = network_of(Yolov5Options(cfg="yolov5s6"), 3)[0].config
    assert stride_for(config, 1280) == 64
    with pytest.raises(ConfigError, match="--imgsz: expected a multiple of the network's stride 64, got 672; try 640"):
        stride_for(config, 672)


def test_the_network_is_that_of_cfg_or_of_the_weights(variables: Any, tmp_path: Path) -> None:
    save_network(tmp_path / "w.safetensors", NARROW, variables)
    own, state = network_of(Yolov5Options(weights=tmp_path / "w.safetensors"), 3)
    assert (own.config.width_multiple, own.config.classes, state is None) == (0.125, 3, False)
    assert network_of(Yolov5Options(cfg="yolov5n.yaml"), 3)[0].config == Config(0.33, 0.25, 3)
    assert network_of(Yolov5Options(), 3)[0].config == Config(0.33, 0.5, 3)
    with pytest.raises(ConfigError, match="--cfg yolov9: YOLOv5: no size is called"):
        network_of(Yolov5Options(cfg="yolov9"), 3)
    with pytest.raises(ConfigError, match="--cfg mine.yaml: cannot be read"):
        network_of(Yolov5Options(cfg="mine.yaml"), 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"imgsz": 300}, "--imgsz: expected a multiple of the network's stride 32, from 64 on, got 300; try 288"),
        ({"batch_size": 0}, "--batch-size: expected 1 or more"),
        ({"label_smoothing": 1.0}, "--label-smoothing: expected 0 to below 1"),
        ({"sink_size": -2}, "--sink-size: expected -1 or more"),
        ({"numerics": 0}, "--numerics: expected 1 or more"),
        ({"policy": "fp17"}, "unknown policy 'fp17'. Did you mean 'fp16'"),
        ({"chip": "tpu-v9"}, "unknown chip 'tpu-v9'"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    Yolov5Options().check()
    with pytest.raises(ConfigError, match=message):
        Yolov5Options(**given).check()


def test_a_run_is_taken_up_with_its_own_options(tmp_path: Path) -> None:
    options = Yolov5Options(project=tmp_path, weights=Path("w.pt"), freeze=(3,), epochs=7, cos_lr=True)
    (tmp_path / "exp").mkdir()
    write_settings(tmp_path / "exp", options, Hyperparameters(lr0=0.5))
    again, folder = resumed(Yolov5Options(project=tmp_path, resume="", progress=False))
    assert folder == tmp_path / "exp"
    assert again == replace(options, resume="", progress=False, hyp=tmp_path / "exp" / "hyp.yaml")
    assert read_hyperparameters(again.hyp) == Hyperparameters(lr0=0.5)
    with pytest.raises(ConfigError, match="--resume: no run in"):
        resumed(Yolov5Options(project=tmp_path / "empty", resume=""))
    with pytest.raises(ConfigError, match="nowhere: no run is there, which would have opt.yaml; give the folder of one, such as .*exp"):
        resumed(Yolov5Options(project=tmp_path, resume="nowhere"))
    (tmp_path / "exp" / "opt.yaml").write_text(yaml.safe_dump({"epochs": 3, "learning": 1}))
    with pytest.raises(ConfigError, match="learning, which are no options"):
        resumed(Yolov5Options(resume=str(tmp_path / "exp")))


@pytest.mark.slow
def test_the_command_has_the_names_of_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["yolov5", "--help"])
    said = capsys.readouterr().out
    names = (
        "--weights --cfg --data --hyp --epochs --batch-size --imgsz --img --img-size --resume --nosave --noval --noautoanchor --optimizer"
    )
    others = "--single-cls --workers --project --name --exist-ok --cos-lr --label-smoothing --patience --freeze --save-period --seed --chip"
    assert [name for name in f"{names} {others} --policy".split() if name not in said] == []
    assert all(one.metadata["help"] for one in dataclasses.fields(Yolov5Options))


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="absent.pt: no such file"):
        network_of(Yolov5Options(weights=tmp_path / "absent.pt"), 3)
    save_state_dict(tmp_path / "other.safetensors", {"fc.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(WeightsError, match=r"other.safetensors: no YOLOv5"):
        network_of(Yolov5Options(weights=tmp_path / "other.safetensors"), 3)
