"""The recipes: log lines as documented, figures judged as documented, a command line that fails early and clearly."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tpuflow
from tpuflow.errors import WeightsError
from tpuflow.examples import data
from train import cifar10, curves, logs
from train import parity_mnist as parity
from train.__main__ import main, parser
from train.logs import Lines, tutorial_accuracies
from train.mnist import initial_variables
from train.options import from_arguments
from train.recipe import Training
from train.recipes import RECIPES

STEPS = 938


class Result:
    """Stands for the result of `tpuflow.train`."""

    def __init__(self, history, *, interrupted=False):
        self.history = history
        self.interrupted = interrupted
        self.numerics = ()

    def report(self) -> str:
        return "a report"

    def to_json(self, path) -> None:
        path.write_text(json.dumps(self.history))


def _history(policy: str) -> list[dict]:
    """A history that holds the documented figures themselves."""
    documented = parity.DOCUMENTED["runs"][policy]
    losses = np.repeat(documented["epoch1_losses"], 100)[:STEPS].tolist()
    scales = [65536.0] + [32768.0] * (STEPS - 1)
    figures = zip(documented["accuracy_percent"], documented["average_loss"], strict=True)
    return [
        {
            "epoch": epoch,
            "losses": losses,
            "accuracy": accuracy,
            "avg_loss": average,
            "loss_scale": scales,
            "skipped": [epoch == 1] + [False] * (STEPS - 1),
        }
        for epoch, (accuracy, average) in enumerate(figures, 1)
    ]


def _follow(lines: Lines, history: list[dict]) -> None:
    for number, epoch in enumerate(history):
        lines.on_epoch_begin(SimpleNamespace(epoch=number, steps=0, step_in_epoch=0))
        for step, loss in enumerate(epoch["losses"], 1):
            lines.on_step_end(SimpleNamespace(epoch=number, step_in_epoch=step, loss=np.float32(loss), batch_size=64))
        lines.on_epoch_end(SimpleNamespace(metrics=epoch))


def test_the_log_lines_are_the_documented_ones():
    out = io.StringIO()
    _follow(Lines(logs.MNIST, 60000, out), _history("fp16")[:2])
    first = out.getvalue().split("Epoch 2")[0]
    assert first == (
        "Epoch 1\n-------------------------------\n"
        "loss: 2.304688  [   64/60000]\n"
        "loss: 2.306641  [ 6464/60000]\n"
        "loss: 2.300781  [12864/60000]\n"
        "loss: 2.304688  [19264/60000]\n"
        "loss: 2.296875  [25664/60000]\n"
        "loss: 2.287109  [32064/60000]\n"
        "loss: 2.287109  [38464/60000]\n"
        "loss: 2.275391  [44864/60000]\n"
        "loss: 2.289062  [51264/60000]\n"
        "loss: 2.285156  [57664/60000]\n"
        "Test Error:\nAccuracy: 18.5%, Avg loss: 2.276759\n\n"
    )


def test_without_an_evaluation_there_is_no_accuracy_line():
    out = io.StringIO()
    lines = Lines([replace(row, every=1) for row in logs.MNIST], 96, out)
    _follow(lines, [{"losses": [1.0, 0.5]}])
    assert out.getvalue().splitlines()[2:] == ["loss: 1.000000  [   64/   96]", "loss: 0.500000  [   96/   96]"]


@pytest.mark.parametrize("policy", parity.BOUNDS)
def test_each_policy_has_twenty_documented_figures_which_fit_themselves(policy):
    figures = parity.compare(policy, _history(policy))
    assert len(figures) == 20 and all(figure.holds for figure in figures)
    assert parity.scaling_problems(policy, _history(policy)) == ()


@pytest.mark.parametrize(
    ("policy", "kind", "off", "holds"),
    [
        ("fp32", "losses", 4e-6, True),
        ("fp32", "losses", 6e-6, False),
        ("fp32", "avg_loss", 6e-6, False),
        ("fp32", "accuracy", 0.1, False),
        ("fp16", "losses", 1e-6, False),
        ("fp16", "avg_loss", 3.9e-5, True),
        ("fp16", "avg_loss", 4.1e-5, False),
        ("mixed", "losses", 2e-6, False),
        ("mixed", "accuracy", 0.1, True),
        ("mixed", "accuracy", 0.2, False),
        ("mixed", "avg_loss", 4.9e-5, True),
        ("mixed", "avg_loss", 5.1e-5, False),
        ("mixed", "avg_loss", float("nan"), False),
    ],
)
def test_a_figure_outside_its_bound_fails(policy, kind, off, holds):
    history = _history(policy)
    shifted = [loss + off for loss in history[0][kind]] if kind == "losses" else history[0][kind] + off
    history[0] = {**history[0], kind: shifted}
    assert all(figure.holds for figure in parity.compare(policy, history)) is holds


def test_only_the_loss_on_a_tie_between_two_fp16_numbers_may_be_the_other_one():
    losses = np.asarray(_history("mixed")[0]["losses"])
    below = [float(np.float32(loss) - np.spacing(np.float16(loss))) for loss in losses]
    history = _history("mixed")
    history[0] = {**history[0], "losses": below}
    assert [figure.place for figure in parity.compare("mixed", history)[:10] if figure.holds] == ["at 57664"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"skipped": [False] * STEPS}, "first step is skipped"),
        ({"skipped": [True] * STEPS}, "no other step"),
        ({"loss_scale": [65536.0] * STEPS}, "halves"),
        ({"loss_scale": [65536.0, 32768.0]}, "every step"),
    ],
)
def test_a_wrong_loss_scale_trace_fails_parity(change, complaint):
    history = _history("mixed")
    history[0].update(change)
    assert complaint in "\n".join(parity.scaling_problems("mixed", history))


@pytest.fixture
def embedded(monkeypatch) -> data.ImageData:
    images = data.load_embedded()
    monkeypatch.setattr(data, "load", lambda *_, **__: images)
    return images


@pytest.fixture
def faked(monkeypatch, embedded):
    """`tpuflow.train` replaced by one that returns the documented history; the arguments of every call."""
    calls = []

    def fake(model, images, **options):
        calls.append({"images": images, **options})
        return Result(_history(options["policy"]))

    monkeypatch.setattr(tpuflow, "train", fake, raising=False)
    return calls


def test_parity_prints_sixty_figures_and_writes_them(faked, tmp_path, capsys):
    assert parity.main(["--json", str(tmp_path / "parity.json")]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok\n") == 60 and "60 figures, 0 outside their bounds" in out
    runs = json.loads((tmp_path / "parity.json").read_text())["runs"]
    assert sum(len(run["figures"]) for run in runs.values()) == 60
    assert len(runs["mixed"]["loss_scale"]) == 5 * STEPS
    assert [call["policy"] for call in faked] == ["fp32", "fp16", "mixed"]
    assert all(call["epochs"] == 5 and call["batch_size"] == 64 for call in faked)
    assert all(isinstance(call["images"][0], np.ndarray) for call in faked), "arrays are walked over in the files' order"


def test_parity_fails_when_one_figure_fails(faked, tmp_path, monkeypatch, capsys):
    wrong = _history("fp16")
    wrong[4]["accuracy"] = 50.0
    monkeypatch.setattr(tpuflow, "train", lambda *_, **__: Result(wrong))
    assert parity.main(["--policies", "fp16", "--json", str(tmp_path / "p.json")]) == 1
    assert "FAILS" in capsys.readouterr().out


def test_after_ctrl_c_the_result_is_written_and_the_exit_status_says_so(faked, tmp_path, monkeypatch, capsys):
    partial = Result(_history("mixed")[:1], interrupted=True)
    monkeypatch.setattr(tpuflow, "train", lambda *_, **__: partial)
    assert main(["mnist", "--json", str(tmp_path / "out.json")]) == 130
    assert len(json.loads((tmp_path / "out.json").read_text())) == 1
    assert parity.main(["--json", str(tmp_path / "parity.json")]) == 130
    assert not (tmp_path / "parity.json").exists() and "interrupted" in capsys.readouterr().err


def test_the_command_line_passes_its_options_on_and_writes_the_result(faked, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = "mnist --policy fp16 --epochs 3 --batch-size 32 --sink-size 7 --lr 0.5 --chip tpu-v4 --engine reference --fidelity bitexact"
    assert main([*options.split(), "--seed", "9", "--init", "random", "--json", str(out), "--no-progress"]) == 0
    (call,) = faked
    expected = {"policy": "fp16", "epochs": 3, "batch_size": 32, "sink_size": 7, "chip": "tpu-v4", "engine": "reference"}
    assert expected.items() <= call.items()
    assert (call["fidelity"], call["seed"], call["params"], call["progress"]) == ("bitexact", 9, None, False)
    assert json.loads(out.read_text())[0]["epoch"] == 1
    printed = capsys.readouterr().out
    assert "Total execution time = " in printed and "a report" in printed


def test_the_default_recipe_starts_from_the_exported_weights(faked, torch_seed0):
    assert main(["mnist"]) == 0
    np.testing.assert_array_equal(faked[0]["params"]["params"]["Dense_2"]["bias"], torch_seed0["linear_relu_stack.4.bias"])


@pytest.mark.parametrize("name", RECIPES)
def test_the_defaults_of_the_command_line_are_those_of_the_recipe(name):
    defaults = RECIPES[name].defaults
    assert from_arguments(defaults, parser().parse_args([name])) == defaults


@pytest.mark.parametrize("where", ["absent/out.json", "."])
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_unwritable_path_is_found_before_training(faked, tmp_path, capsys, option, where):
    assert main(["mnist", option, str(tmp_path / where)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert faked == [] and list(tmp_path.iterdir()) == []


def test_bad_data_is_one_line_on_stderr_and_no_traceback(capsys, tmp_path):
    assert main(["mnist", "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_unknown_init_is_taken_for_a_file_of_weights_and_refused():
    with pytest.raises(WeightsError, match="xavier"):
        initial_variables("xavier")


def test_weights_that_no_recipe_exported_are_refused(small_mnist, capsys):
    assert main(["lenet", "--init", "torch-seed0"]) == 2
    assert "no weights were exported for this recipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_the_help_names_every_option_and_says_something_of_each(name, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for one in fields(RECIPES[name].defaults):
        words = one.metadata.get("flag") or f"--{one.name.replace('_', RECIPES[name].spelling)}"
        assert (f"{words} " in text) == (one.name not in RECIPES[name].without), words
    assert all(one.metadata["help"] for one in fields(RECIPES[name].defaults))


@pytest.fixture
def small_mnist(monkeypatch) -> data.ImageData:
    """Random digits, as bytes."""
    images = _random_images("mnist", (28, 28, 1))
    monkeypatch.setattr(data, "load", lambda *_, **__: images)
    return images


@pytest.fixture
def small_cifar10(monkeypatch) -> data.ImageData:
    """Random pictures, as bytes."""
    images = _random_images("cifar10", (32, 32, 3))
    monkeypatch.setattr(cifar10, "load", lambda *_, **__: images)
    return images


def _random_images(name: str, shape: tuple[int, ...]) -> data.ImageData:
    rng = np.random.default_rng(0)
    train, test = (
        (rng.integers(0, 256, (count, *shape)).astype(np.uint8), rng.integers(0, 10, count).astype(np.int32)) for count in (64, 24)
    )
    return data.ImageData(name, "drawn at random", train, test)


def _run(*arguments: str) -> int:
    return main([*arguments, "--no-progress"])


@pytest.fixture
def captured(monkeypatch):
    """`tpuflow.train` replaced by one that keeps its arguments and gives a short history."""
    calls = []

    def fake(model, images, **options):
        calls.append({"model": model, "images": images, **options})
        return Result([{"epoch": 1, "losses": [2.0], "accuracy": 50.0, "avg_loss": 2.0}])

    monkeypatch.setattr(tpuflow, "train", fake, raising=False)
    return calls


@pytest.mark.slow
def test_lenet_prints_the_guides_lines_and_walks_on_in_sinks(small_mnist, capsys):
    assert _run("lenet", "--batch-size", "8", "--sink-size", "3", "--epochs", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "============== Starting Training =============="
    assert re.fullmatch(r"epoch: 1 step: 3, loss is 2\.\d{5,8}", lines[1])
    assert re.fullmatch(r"epoch: 2 step: 3, loss is 2\.\d{5,8}", lines[2])
    assert "LeNet5 trained in fp32 on generic" in "\n".join(lines)


def test_a_loss_is_printed_in_as_many_digits_as_fp32_has():
    out = io.StringIO()
    lines = Lines(logs.LENET, out=out)
    _follow_sinks(lines, [0.5399814844131470, 0.00017951085465028882])
    assert out.getvalue().splitlines()[1:] == ["epoch: 1 step: 1, loss is 0.5399815", "epoch: 2 step: 1, loss is 0.00017951085"]


def _follow_sinks(lines, losses: list[float]) -> None:
    lines.on_train_begin(SimpleNamespace())
    for number, loss in enumerate(losses):
        lines.on_epoch_begin(SimpleNamespace(steps=number, step_in_epoch=0))
        run = SimpleNamespace(epoch=number, step_in_epoch=1, steps=number + 1, loss=loss, sink_seconds=0.25)
        lines.on_step_end(run)
        lines.on_sink_end(run)
        lines.on_epoch_end(run)


def test_the_guide_of_resnet_has_its_lines(capsys):
    out = io.StringIO()
    _follow_sinks(Lines(logs.RESNET, out=out), [1.2800476551055908])
    lines = out.getvalue().splitlines()
    assert lines[1] == "epoch: 1 step 1, loss is 1.2800476551055908"
    assert lines[2] == "250.0 ms" and re.fullmatch(r"Epoch time: \d+\.\d{3}, per step time: \d+\.\d{3}", lines[3])


def test_the_tutorial_prints_means_of_2000_losses_and_drops_a_rest():
    out = io.StringIO()
    lines = Lines(logs.TUTORIAL, out=out)
    for epoch, losses in enumerate((range(4500), [2.2084] * 2000)):
        lines.on_epoch_begin(SimpleNamespace(steps=0, step_in_epoch=0))
        for step, loss in enumerate(losses, 1):
            lines.on_step_end(SimpleNamespace(epoch=epoch, step_in_epoch=step, loss=float(loss)))
    lines.on_train_end(SimpleNamespace())
    assert out.getvalue().splitlines() == [
        "[1,  2000] loss: 999.500", "[1,  4000] loss: 2999.500", "[2,  2000] loss: 2.208", "Finished Training"
    ]  # fmt: skip


def test_the_tutorial_ends_with_the_accuracy_of_every_class():
    text = tutorial_accuracies({"plane": (555, 1000), "car": (10, 1000), "bird": (0, 0)})
    assert text.splitlines() == [
        "Accuracy of the network on the 2000 test images: 28 %",
        "Accuracy for class: plane is 55.5 %",
        "Accuracy for class: car   is 1.0 %",
        "No test image of class: bird",
    ]


@pytest.mark.slow
def test_the_custom_loop_prints_a_line_a_sink_and_ends_with_the_accuracy(small_mnist, capsys):
    assert main(["lenet_custom_loop", "--batch-size", "8", "--sink-size", "3", "--epochs", "2", "--policy", "O3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "============== Starting Training =============="
    assert re.fullmatch(r"epoch: 1/2, losses: 2\.\d+", lines[1]) and re.fullmatch(r"epoch: 2/2, losses: 2\.\d+", lines[2])
    share = float(re.fullmatch(r"Accuracy: \{'acc': (.+)\}", lines[3])[1])
    assert 24 * share == pytest.approx(round(24 * share)), "a share of 24 test images"


def _lenet_weights(folder: Path) -> Path:
    """A file of weights as PyTorch names them."""
    rng = np.random.default_rng(3)
    shapes = {"conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84)}
    state = {f"{name}.weight": 0.1 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    state |= {f"{name}.bias": np.zeros(shapes[name][0], np.float32) for name in ("fc1", "fc2", "fc3")}
    np.savez(folder / "lenet.npz", **state)
    return folder / "lenet.npz"


@pytest.mark.slow
def test_the_custom_loop_and_the_training_give_the_same_losses(small_mnist, tmp_path, capsys):
    arguments = ["--batch-size", "8", "--sink-size", "4", "--epochs", "2", "--test-samples", "0"]
    assert main(["lenet_custom_loop", *arguments, "--init", str(_lenet_weights(tmp_path))]) == 0
    assert _run("lenet", *arguments, "--init", str(_lenet_weights(tmp_path)), "--json", str(tmp_path / "out.json")) == 0
    losses = [epoch["losses"][-1] for epoch in json.loads((tmp_path / "out.json").read_text())["history"]]
    printed = re.findall(r"losses: (\S+)", capsys.readouterr().out)
    np.testing.assert_allclose([float(text) for text in printed], losses, rtol=1e-6)


@pytest.mark.slow
def test_cifar_starts_from_pytorchs_weights_and_counts_every_class(small_cifar10, capsys):
    assert _run("cifar", "--epochs", "1", "--test-samples", "20") == 0
    out = capsys.readouterr().out
    assert "Finished Training" in out and "on the 20 test images" in out and out.count("Accuracy for class: ") >= 8
    overall = int(re.search(r"test images: (\d+) %", out)[1])
    assert f"accuracy {overall}.0%" in out, "the count of classes and the evaluation of the training must agree"


@pytest.mark.parametrize(
    ("name", "model", "rate"),
    [("resnet50", "ResNet", 0.01), ("resnet101", "ResNet", 0.01), ("vgg16", "VGG16", 0.01), ("squeezenet", "SqueezeNet", 0.001)],
)
def test_recipes_of_larger_networks_transform_their_images_on_the_way(name, model, rate, small_cifar10, captured, capsys):
    assert _run(name, "--image-size", "40", "--batch-size", "4", "--epochs", "2") == 0
    (call,) = captured
    images, labels = next(iter(call["images"]))
    assert type(call["model"]).__name__ == model and images.shape == (4, 40, 40, 3) and images.dtype == np.float32 and len(labels) == 4
    assert len(call["eval_data"]) == 6 and next(iter(call["eval_data"]))[0].shape == (4, 40, 40, 3)
    state = call["optimizer"].init({"w": np.ones(2, np.float32)})
    updates, _ = call["optimizer"].update({"w": np.ones(2, np.float32)}, state, {"w": np.zeros(2, np.float32)})
    np.testing.assert_allclose(updates["w"], -rate, rtol=1e-6)


def test_relu_reduce_mean_dense_prints_the_documented_zeros(capsys):
    assert _run("relu_reduce_mean_dense") == 0
    assert capsys.readouterr().out == (
        "-------loss------ [0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0.\n 0. 0. 0. 0. 0. 0. 0. 0.]\n"
    )


@pytest.mark.parametrize(
    ("arguments", "epochs", "sink_size"),
    [("", 10, 1000), ("--steps 12 --sink-size -1", 2, -1), ("--steps 30 --sink-size 20", 2, 20), ("--steps 9 --sink-size 0", 2, 0)],
)
def test_there_are_as_many_epochs_as_the_steps_need(arguments, epochs, sink_size, small_mnist, captured):
    assert _run("lenet", "--batch-size", "8", *arguments.split()) == 0
    assert (captured[0]["epochs"], captured[0]["sink_size"]) == (epochs, sink_size)


@pytest.mark.slow
@pytest.mark.parametrize(("sink_size", "trips"), [("0", 9), ("4", 3), ("-1", 2)])
def test_a_training_ends_after_the_steps_that_are_asked_for(sink_size, trips, small_mnist, capsys):
    assert _run("lenet", "--batch-size", "8", "--sink-size", sink_size, "--steps", "9", "--test-samples", "0") == 0
    assert f": 9 steps of 8, {trips} round trips" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_that_are_no_whole_sinks_are_refused_by_the_custom_loop(small_mnist, capsys):
    assert main(["lenet_custom_loop", "--steps", "30", "--sink-size", "20"]) == 2
    assert "not a multiple" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_that_was_saved_goes_on_where_it_ended(small_cifar10, tmp_path, capsys):
    def run(*arguments: str, to: str) -> list[float]:
        assert _run("cifar", "--test-samples", "0", *arguments, "--json", str(tmp_path / to)) == 0
        return [loss for epoch in json.loads((tmp_path / to).read_text())["history"] for loss in epoch["losses"]]

    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-steps", "5"]
    whole = run("--steps", "20", to="whole.json")
    assert run("--steps", "10", *saved, to="half.json") == whole[:10]
    assert run("--steps", "20", "--resume", *saved, to="rest.json")[-10:] == whole[10:]


@pytest.mark.slow
def test_a_picture_and_event_files_are_written_when_asked_for(small_mnist, tmp_path):
    arguments = ["--batch-size", "8", "--steps", "6", "--schedule", "poly", "--accumulate", "2"]
    assert _run("lenet", *arguments, "--plot", str(tmp_path / "out.svg"), "--tensorboard", str(tmp_path / "events")) == 0
    assert (tmp_path / "out.svg").read_text().count("<svg") == 1
    (events,) = (tmp_path / "events").iterdir()
    assert b"train/learning_rate" in events.read_bytes()


@pytest.mark.parametrize("option", [["--resume"], ["--checkpoint-steps", "5"]])
def test_checkpoints_need_a_folder(option, capsys):
    assert main(["lenet", *option]) == 2
    assert "need --checkpoint-dir" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--steps", "--train-samples"])
def test_numbers_out_of_range_are_refused_by_name(option, capsys):
    assert main(["lenet", option, "0"]) == 2
    assert f"{option}: expected 1 or more, got 0" in capsys.readouterr().err


def test_precision_options_reach_the_training(small_mnist, captured):
    assert _run("lenet", "--policy", "O3", "--loss-scale", "512", "--keep-batchnorm-fp32", "yes", "--accumulate", "4") == 0
    assert _run("lenet", "--policy", "O2", "--loss-scale", "dynamic", "--keep-batchnorm-fp32", "no") == 0
    names = ("policy", "loss_scale", "keep_batchnorm_fp32", "accumulate_steps")
    assert [tuple(call[name] for name in names) for call in captured] == [("O3", 512.0, True, 4), ("O2", "dynamic", False, 1)]


def test_a_schedule_counts_updates_and_not_the_steps_between(small_mnist, captured):
    assert _run("lenet", *"--schedule linear --lr-end 0 --lr 1 --momentum 0 --steps 8 --sink-size -1 --accumulate 2".split()) == 0
    (call,) = captured
    state, rates = call["optimizer"].init({"w": np.ones(1, np.float32)}), []
    for _ in range(5):
        updates, state = call["optimizer"].update({"w": np.ones(1, np.float32)}, state)
        rates.append(-float(updates["w"][0]))
    np.testing.assert_allclose(rates, [1, 0.75, 0.5, 0.25, 0.25], rtol=1e-6)


def test_smoothing_decay_and_clipping_reach_the_training(small_mnist, captured):
    assert _run("lenet", "--label-smoothing", "0.1", "--weight-decay", "0.5", "--clip-norm", "0.1", "--momentum", "0", "--lr", "1") == 0
    (call,) = captured
    assert call["loss"].name == "softmax_cross_entropy(label_smoothing=0.1, spread=others)"
    params, grads = {"w": np.full(4, 2.0, np.float32)}, {"w": np.full(4, 5.0, np.float32)}
    updates, _ = call["optimizer"].update(grads, call["optimizer"].init(params), params)
    np.testing.assert_allclose(updates["w"], -(0.1 / 2 + 0.5 * 2.0), rtol=1e-5)


def _runs(*pairs: tuple[float, float]) -> dict[str, list[dict]]:
    """Trainings of O0 and O3 that end at these accuracies, a pair for each seed."""
    found = {"losses": [2.0] * 30, "loss_scale": [1.0] * 30, "skipped": [False] * 30, "avg_loss": 1.9}
    return {policy: [{**found, "accuracy": pair[i]} for pair in pairs] for i, policy in enumerate(("O0", "O3"))}


def test_curves_say_mean_deviation_and_standard_error_of_the_seeds():
    figures = curves.compare(_runs((30.0, 31.0), (32.0, 31.0), (31.0, 34.0), (29.0, 30.0)))
    deviation = math.sqrt((0 + 4 + 4 + 0) / 3)
    difference = figures["accuracy_difference"]
    assert difference["values"] == (1.0, -1.0, 3.0, 1.0), "pair by pair"
    assert [difference[name] for name in ("mean", "deviation", "error")] == pytest.approx([1.0, deviation, deviation / 2])
    assert figures["accuracies"]["O0"]["mean"] == 30.5 and figures["accuracies"]["O0"]["deviation"] == pytest.approx(math.sqrt(5 / 3))
    rng = np.random.default_rng(0)
    errors = [curves.spread(list(rng.normal(3.0, 2.0, 8))) for _ in range(2000)]
    assert np.std([found.mean for found in errors]) == pytest.approx(2 / math.sqrt(8), rel=0.05), (
        "which is what the standard error estimates"
    )
    assert np.mean([found.error**2 for found in errors]) == pytest.approx(4 / 8, rel=0.05)


def test_curves_of_two_policies_are_drawn_with_their_spread(tmp_path):
    runs = _runs((40.0, 42.5), (41.0, 42.5))
    runs["O3"][1]["losses"] = [2.0] * 29 + [4.0]
    assert curves.compare(runs)["largest_loss_difference"] == pytest.approx(0.05), "of the means over seeds of means over 20 steps"
    curves.draw(runs, "two lines", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert drawn.count('id="line2d') > 4 and drawn.count('id="FillBetweenPolyCollection') == 2


@pytest.mark.parametrize(
    ("pairs", "status", "words"),
    [
        (((40.0, 43.0), (42.0, 42.9)), 0, "1.95 points (standard deviation 1.48, standard error 1.05) over 2 seeds: the mean is within"),
        (((40.0, 43.0), (42.0, 43.1)), 1, "the mean is beyond the bound of 2"),
        (((43.0, 40.0), (43.1, 42.0)), 1, "O3 - O0: -2.05"),
        (((40.0, 46.0), (45.0, 40.0)), 0, "these seeds do not tell precision from chance; 61 would"),
    ],
)
def test_curves_are_judged_by_the_means_over_seeds(pairs, status, words, small_cifar10, monkeypatch, tmp_path, capsys):
    runs, seen = _runs(*pairs), []

    def train(self, options, images, *, logs):
        seen.append((options.policy, options.seed))
        found = runs[options.policy][options.seed - 5]
        return Result([found])

    monkeypatch.setattr(Training, "run", train)
    files = ["--plot", str(tmp_path / "c.png"), "--json", str(tmp_path / "c.json")]
    assert curves.main(["--no-progress", "--seeds", "2", "--seed", "5", *files]) == status
    assert seen == [("O0", 5), ("O3", 5), ("O0", 6), ("O3", 6)]
    assert words in capsys.readouterr().out
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["accuracy_difference"]["mean"] == pytest.approx(np.mean([b - a for a, b in pairs])) and written["settings"]["seeds"] == 2


@pytest.mark.parametrize("seeds", ["1", "0", "-3", "two"])
def test_one_seed_is_not_enough_for_curves(seeds, capsys):
    with pytest.raises(SystemExit, match="2"):
        curves.main(["--seeds", seeds])
    assert "one seed has no spread; give 2 or more" in capsys.readouterr().err or seeds == "-3"


@pytest.mark.parametrize("words", [["lenet_custom_loop", "--json", "out.json"], ["relu_reduce_mean_dense", "--sink-size", "4"]])
def test_an_option_that_a_recipe_has_no_use_for_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"unrecognized arguments: {' '.join(words[1:])}" in capsys.readouterr().err
