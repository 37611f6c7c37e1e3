"""The recipes: log lines as documented, figures judged as documented, a command line that fails early and clearly."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

import tpuflow
from tpuflow.errors import ConfigError
from train import data, parity
from train.__main__ import main, parser
from train.logs import LogLines
from train.mnist import Recipe, initial_variables

STEPS = 938


class Result:
    """Stands for the result of `tpuflow.train`."""

    def __init__(self, history, *, interrupted=False):
        self.history = history
        self.interrupted = interrupted

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


def _follow(lines: LogLines, history: list[dict]) -> None:
    for epoch in history:
        lines.on_epoch_begin(SimpleNamespace(metrics={}))
        for loss in epoch["losses"]:
            lines.on_step_end(SimpleNamespace(loss=np.float32(loss), metrics={}))
        lines.on_epoch_end(SimpleNamespace(metrics=epoch))


def test_the_log_lines_are_the_documented_ones():
    out = io.StringIO()
    _follow(LogLines(60000, 64, out=out), _history("fp16")[:2])
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
    lines = LogLines(96, 64, every=1, out=out)
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
    monkeypatch.setattr("train.__main__.load", lambda *_, **__: images)
    return images


@pytest.fixture
def faked(monkeypatch, embedded):
    """`tpuflow.train` replaced by one that returns the documented history; the arguments of every call."""
    calls = []

    def fake(model, images, **options):
        calls.append(options)
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
    assert all(call["epochs"] == 5 and call["batch_size"] == 64 and not call["shuffle"] for call in faked)


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


def test_the_defaults_of_the_command_line_are_those_of_the_recipe():
    options = vars(parser().parse_args(["mnist"]))
    assert Recipe(**{name: options[name] for name in Recipe.__dataclass_fields__}) == Recipe()


@pytest.mark.parametrize("where", ["absent/out.json", "."])
def test_an_unwritable_json_path_is_found_before_training(faked, tmp_path, capsys, where):
    assert main(["mnist", "--json", str(tmp_path / where)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert faked == [] and list(tmp_path.iterdir()) == []


def test_bad_data_is_one_line_on_stderr_and_no_traceback(capsys, tmp_path):
    assert main(["mnist", "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_unknown_init_names_the_known_ones():
    with pytest.raises(ConfigError, match="torch-seed0, random"):
        initial_variables("xavier")


def test_the_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["mnist", "--help"])
    text = capsys.readouterr().out
    for option in ("--policy", "--epochs", "--batch-size", "--sink-size", "--chip", "--engine", "--fidelity", "--lr", "--seed", "--init"):
        assert option in text
    for option in ("--json", "--no-progress", "--data-dir", "TPUFLOW_DATA"):
        assert option in text
