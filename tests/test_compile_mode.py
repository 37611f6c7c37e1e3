"""Compile mode: the files are the same in every run, run to the step's own bits, and say where a stage went wrong."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
import optax
import pytest

import tpuflow
from tests.compile_cases import CASES
from tpuflow import cli, compiler
from tpuflow.archives import storable
from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.passes.base import Pass
from tpuflow.stages.differences import DEVICE, first_difference
from tpuflow.stages.flattening import leaf_names
from train.__main__ import main
from train.compile_models import MODELS, Sizes
from train.parity import main as compare_with_pytorch

TINY = Sizes(batch=2, image_size=32, sequence=12)


def _compile(folder: Path, model: str, *words: str) -> int:
    return main(["compile", "--model", model, "--out", str(folder), *words])


def _dumped(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_with_const_name_every_file_is_the_same_in_every_run(tmp_path):
    for folder in ("one", "two"):
        assert _compile(tmp_path / folder, "bert-tiny", "--sequence", "12", "--debug", "const_name") == 0
    one, two = _dumped(tmp_path / "one"), _dumped(tmp_path / "two")
    assert one == two
    stages = [f"bert-tiny.{i:02d}-{name}.graph" for i, name in enumerate(("import", *(step.name for step in PIPELINE), "kernels"))]
    kinds = ("inputs.npz", "jaxpr", "tpx", "tpxs", "weights.npz")
    assert set(one) == {*stages, *(f"bert-tiny.{kind}" for kind in kinds), "manifest.json"}


def test_without_const_name_the_files_bear_the_time(tmp_path):
    assert _compile(tmp_path / "out", "mlp") == 0
    names = set(_dumped(tmp_path / "out")) - {"manifest.json"}
    assert names and all(re.fullmatch(r"mlp-\d{8}-\d{6}\..+", name) for name in names)
    assert len({name.split(".")[0] for name in names}) == 1


def test_the_manifest_says_what_every_file_is(tmp_path, capsys):
    assert _compile(tmp_path / "out", "mlp", "--batch", "3", "--policy", "mixed", "--debug", "const_name", "--chip", "tpu-v4") == 0
    files = _dumped(tmp_path / "out")
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    assert (manifest["model"], manifest["chip"], manifest["policy"], manifest["batch"]) == ("mlp", "tpu-v4", "mixed", {"batch": 3})
    assert [f"mlp.{stage}.graph" for stage in manifest["stages"]] == [name for name in files if name.endswith(".graph")]
    assert manifest["versions"]["jax"] == jax.__version__ and manifest["modelled"]["modelled_seconds"] > 0
    assert manifest["memory_bytes"]["peak"] >= manifest["memory_bytes"]["argument"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*files, "manifest.json"))


def _run_dump(folder: Path, name: str) -> dict[str, np.ndarray]:
    """What the dumped binary gives on the dumped arrays, by the command line."""
    inputs = [str(folder / f"{name}.{kind}.npz") for kind in ("weights", "inputs")]
    command = ["run", str(folder / f"{name}.tpx"), "--engine", "reference", "--inputs", *inputs, "--outputs", str(folder / "out.npz")]
    assert cli.main(command) == 0
    with np.load(folder / "out.npz") as found:
        return dict(found)


def _step_of(name: str, sizes: Sizes, policy: str, loss: str | None = None):
    """The step in the process, and the state and the batch that compile mode makes for it."""
    subject = MODELS[name]
    batch = subject.batch(sizes, np.random.default_rng(0))
    made = tpuflow.training_step(subject.model(sizes), batch, policy=policy, optimizer=optax.sgd(0.01), loss=subject.loss_of(loss))
    return made.step, made.state, batch


def _by_name(state, figures) -> dict[str, np.ndarray]:
    names, leaves = (*leaf_names(state), *leaf_names(figures)), (*jax.tree.leaves(state), *jax.tree.leaves(figures))
    words = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return storable(dict(zip(names, map(np.asarray, words), strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "words", "bound"),
    [
        ("mlp", "fp16", "", 1e-3),
        ("lenet", "mixed", "--loss first-logit", 1e-3),
        pytest.param("bert-tiny", "bf16", "--sequence 12", 0.02, marks=pytest.mark.slow),
    ],
)
def test_the_dumped_binary_with_the_dumped_arrays_gives_the_steps_own_bits(name, policy, words, bound, tmp_path):
    assert _compile(tmp_path, name, "--debug", "const_name", "--batch", "2", "--policy", policy, *words.split()) == 0
    found = _run_dump(tmp_path, name)
    step, state, batch = _step_of(name, TINY, policy, "first-logit" if "first" in words else None)
    plain = jax.jit(step)(state, batch)[1].loss
    expected = _by_name(*tpuflow.jit(step, chip="bm1690", engine="reference", donate_argnums=0)(state, batch))
    assert found.keys() == expected.keys()
    for port, array in expected.items():
        assert found[port].dtype == array.dtype and found[port].tobytes() == array.tobytes(), port
    np.testing.assert_allclose(found["loss"], plain, rtol=bound)


@pytest.mark.slow
@pytest.mark.torch
def test_the_dumped_step_of_bert_is_the_one_that_pytorch_makes_of_the_dumped_weights(transformers, tmp_path, capsys):
    written = f"--out {tmp_path}/dump --json {tmp_path}/found.json --page {tmp_path}/found.md"
    words = f"compile --model bert-tiny --batch 3 --sequence 12 --lr 0.5 {written}"
    assert compare_with_pytorch(words.split()) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == 0 and found["loss"] == pytest.approx(found["torch_loss"], rel=2e-6) and found["parameters_apart"] < 1e-5
    printed = capsys.readouterr().out
    assert printed in (tmp_path / "found.md").read_text() and "bert-tiny.tpxs" in printed
    assert compare_with_pytorch(words.split()) == 2
    assert "the folder is not empty" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlp", "--policy mixed"),
        ("lenet", ""),
        pytest.param("bert-tiny", "--policy mixed_bf16 --sequence 12", marks=pytest.mark.slow),
    ],
)
def test_all_stages_and_the_device_compute_the_same_bits(name, words, tmp_path, capsys):
    assert _compile(tmp_path, name, "--verify", *words.split()) == 0
    assert f"verified: {2 + len(PIPELINE)} stages and the device compute the same bits" in capsys.readouterr().out


def _stages_of(graph: Graph, passes=PIPELINE):
    stages = []
    program = compile_graph(graph, chip="bm1690", passes=passes, watch=lambda name, graph: stages.append((name, graph)))
    return stages, program, get_chip("bm1690")


@pytest.mark.parametrize("name", ["dense_layer", "nested", "scan_with_results", "recurrent_gradient"])
def test_no_difference_is_found_where_there_is_none(name):
    case = CASES[name]
    assert first_difference(*_stages_of(case.graph()), [np.asarray(x) for x in case.arguments]) is None


class PlantedFault(Pass):
    """Turns the first 0.5 of a graph into 0.75, in regions too."""

    def __call__(self, graph: Graph) -> Graph:
        return _with_fault(graph)[0]


def _with_fault(graph: Graph) -> tuple[Graph, bool]:
    nodes, done = [], False
    for node in graph.nodes:
        if not done and node.op == "full" and node.attrs["value"] == 0.5:
            node, done = replace(node, attrs=MappingProxyType({"value": 0.75})), True
        regions = []
        for region in node.regions:
            changed, now = (region, False) if done else _with_fault(region)
            regions.append(changed)
            done = done or now
        nodes.append(replace(node, regions=tuple(regions)) if done and regions else node)
    return replace(graph, nodes=tuple(nodes)), done


def _halved(x):
    doubled = x @ x
    halved = jax.named_scope("block")(lambda y: y * np.float32(0.5))(doubled)
    return doubled.sum(), halved.max(axis=0)


def _halved_graph() -> Graph:
    return compiler.lower_with_calls(jax.make_jaxpr(_halved)(np.ones((4, 4), np.float32)), "halved", output_names=("sum", "half"))[0]


X = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.mark.parametrize("place", range(len(PIPELINE) + 1))
def test_a_pass_that_changes_a_constant_is_named_with_its_first_tensor(place):
    passes = (*PIPELINE[:place], PlantedFault(), *PIPELINE[place:])
    stages, program, chip = _stages_of(_halved_graph(), passes)
    found = first_difference(stages, program, chip, [X])
    before = "import" if place == 0 else PIPELINE[place - 1].name
    assert found is not None and (found.before, found.after) == (before, "planted-fault")
    assert "test_compile_mode.py" in found.source and (place > 4 or (found.op, found.scope) == ("full", "block"))
    assert found.elements > 0 and found.largest > 0
    assert f"is the first that planted-fault computes otherwise than {before}" in str(found)


def test_a_fault_between_the_last_graph_and_the_binary_is_named_with_its_kernel(monkeypatch):
    assemble = compiler.assemble
    monkeypatch.setattr(compiler, "assemble", lambda graph, *others: assemble(_with_fault(graph)[0], *others))
    stages, program, chip = _stages_of(_halved_graph())
    found = first_difference(stages, program, chip, [X])
    assert found is not None and (found.before, found.after) == (stages[-1][0], DEVICE)
    assert found.source.startswith("test_compile_mode.py")


def test_a_binary_of_another_step_is_named_with_its_first_output():
    stages, _, chip = _stages_of(_halved_graph())
    other = compile_graph(_with_fault(_halved_graph())[0], chip=chip)
    found = first_difference(stages, other, chip, [X])
    assert found is not None and (found.output, found.tensor, found.after) == ("half", "f32[4]", DEVICE)
    expected = (X @ X).max(axis=0)
    assert (found.elements, found.largest) == (4, float(expected.max() / 4))


@pytest.mark.slow
def test_compile_mode_tells_of_a_fault(tmp_path, monkeypatch, capsys):
    class MinimumForMaximum(PlantedFault):
        def __call__(self, graph: Graph) -> Graph:
            nodes = tuple(
                replace(n, attrs=MappingProxyType({**n.attrs, "op": "min"})) if n.op == "reduce" and n.attrs["op"] == "max" else n
                for n in graph.nodes
            )
            return replace(graph, nodes=nodes)

    monkeypatch.setattr(compiler, "PIPELINE", (MinimumForMaximum(), *PIPELINE))
    assert _compile(tmp_path, "lenet", "--verify") == 1
    assert "that 01-minimum-for-maximum computes otherwise than 00-import" in capsys.readouterr().out


# --- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--model resnet5", "Did you mean 'resnet50'?"),
        ("--model mlp --chip bm1960", "Did you mean 'bm1690'?"),
        ("--model mlp --policy fp61", "Did you mean 'fp16'?"),
        ("--model mlp --image-size 32", "--image-size: batches of mlp have no such size; leave it out"),
        ("--model resnet50 --sequence 12", "--sequence: batches of resnet50 have no such size"),
        ("--model bert-tiny --sequence 17", "--sequence: expected a whole number from 1 to 16, got 17"),
        ("--model resnet50 --no-dropout", "--no-dropout: resnet50 is as its authors have it"),
        ("--model mlp --batch 0", "--batch: expected a whole number from 1 on, got 0"),
        ("--model mlp --lr nan", "--lr: expected a rate above 0, got nan"),
        ("--model mlp --seed -1", "--seed: expected a whole number from 0 on, got -1"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_written(words, text, tmp_path, capsys):
    assert main(["compile", *words.split(), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and text in error and not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    assert _compile(tmp_path, "mlp") == 2
    assert "the folder is not empty; expected an empty one or none" in capsys.readouterr().err
    assert _dumped(tmp_path) == {"mine": b"kept"}


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_written_is_refused(where, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert _compile(tmp_path / where, "mlp") == 2
    assert "cannot be written (" in capsys.readouterr().err


def test_a_disk_that_is_full_is_one_line_and_leaves_no_manifest(tmp_path, monkeypatch, capsys):
    def full(program, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.compile_mode.save", full)
    assert _compile(tmp_path, "mlp") == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err and not (tmp_path / "manifest.json").exists()


def test_an_input_that_two_files_hold_is_refused(tmp_path, capsys):
    assert _compile(tmp_path, "mlp", "--debug", "const_name") == 0
    weights = str(tmp_path / "mlp.weights.npz")
    assert cli.main(["run", str(tmp_path / "mlp.tpx"), "--inputs", weights, weights]) == 2
    assert "Give each input in one file" in capsys.readouterr().err
