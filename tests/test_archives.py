"""Archives of arrays: damage and forgery are one line of the command line, and no element is inflated before all is known to fit."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.mutating import flipped
from tests.program_builder import Builder
from tests.programs import binary, map_kernel, map_program
from tpuflow import cli
from tpuflow.archives import ALWAYS_READ_BYTES, Archive, write_arrays
from tpuflow.dtypes import BF16, F32, PRED
from tpuflow.errors import ArchiveError, LaunchError, WeightsError
from tpuflow.importers import load_state_dict
from tpuflow.isa.file import save
from tpuflow.isa.program import Program

SHAPE = (4, 6)
MUTANTS = 600
"""Forged archives: about 4 s."""


def program(*outputs: str, dtype=F32) -> Program:
    """x + y, once for each name of an output."""
    b = Builder()
    x, y = b.input("x", dtype, SHAPE), b.input("y", dtype, SHAPE)
    op = "and" if dtype == PRED else "add"
    return b.program(*(map_kernel(b, [x, y], b.new_output(name, dtype, SHAPE), binary(op), SHAPE) for name in outputs or ("out",)))


def arrays(dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(SHAPE).astype(dtype) for name in ("x", "y")}


def archive_bytes(content: dict[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, allow_pickle=True, **content)
    return out.getvalue()


def forged(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file of any members; a name may come twice as "x.npy" and "x.npy " (the space is taken off)."""
    out = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(out, "w", method) as archive:  # zipfile warns of names that come twice
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name.rstrip()), content, method)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def claimed(descr: object, shape: object, content: bytes = b"", version: bytes = b"\x01\0") -> bytes:
    """A member whose header claims anything."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    length = len(text).to_bytes(2 if version == b"\x01\0" else 4, "little")
    return b"\x93NUMPY" + version + length + text + content


class Command:
    """`tpuflow run` on one saved Program, in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], made: Program):
        self._folder, self._capsys = folder, capsys
        save(made, folder / "p.tpx")

    def run(self, content: bytes | None) -> tuple[int, str, bytes]:
        """(exit status, what it says on stderr, the outputs' file)."""
        inputs, outputs = self._folder / "in.npz", self._folder / "out.npz"
        outputs.unlink(missing_ok=True)
        given = [] if content is None else ["--inputs", str(inputs)]
        if content is not None:
            inputs.write_bytes(content)
        status = cli.main(["run", str(self._folder / "p.tpx"), *given, "--outputs", str(outputs), "--engine", "reference"])
        return status, self._capsys.readouterr().err, outputs.read_bytes() if outputs.exists() else b""

    def refuses(self, content: bytes | None, words: str) -> None:
        """That it ends with status 2 and one line that holds the words, and writes nothing."""
        status, said, written = self.run(content)
        assert status == 2 and words in said and not written, said
        assert said.startswith("tpuflow run: ") and said.count("\n") == 1 and len(said) < 1000


@pytest.fixture
def command(tmp_path, capsys) -> Callable[[Program], Command]:
    return lambda made: Command(tmp_path, capsys, made)


# --- inputs -----------------------------------------------------------------------------------------------------------


X, Y = arrays().values()
BAD_INPUTS = {
    # name: (content, words of the message)
    "empty": (b"", "not an .npz file"),
    "text": (b"hello\nworld", "not an .npz file"),
    "cut short": (archive_bytes(arrays())[:-40], "not an .npz file"),
    "array cut short": (forged({"x.npy": npy(X)[:-4], "y.npy": npy(Y)}), "array 'x': float32[4, 6] has 96 bytes, and 92 are there"),
    "header cut short": (forged({"x.npy": npy(X)[:40], "y.npy": npy(Y)}), "array 'x'"),
    "no header": (forged({"x.npy": X.tobytes(), "y.npy": npy(Y)}), "array 'x'"),
    "a name twice": (forged({"x.npy": npy(X), "x.npy ": npy(X), "y.npy": npy(Y)}), "two arrays called 'x'"),
    "a name missing": (archive_bytes({"x": X}), "missing ['y'], unknown []"),
    "a name too many": (archive_bytes({"x": X, "y": Y, "../z": Y}), "missing [], unknown ['../z']"),
    "ten thousand names": (forged({f"{i}.npy": b"" for i in range(10_000)}), "and 9992 more]"),
    "a name of many lines": (forged({"a\nb.npy": npy(X)}), r"unknown ['a\nb']"),
    "another type": (archive_bytes({"x": X.astype(np.float64), "y": Y}), "input 'x': expected f32[4, 6], got float64[4, 6]"),
    "another byte order": (archive_bytes({"x": X.astype(">f4"), "y": Y}), "input 'x': expected f32[4, 6], got >f4[4, 6]"),
    "another shape": (archive_bytes({"x": X, "y": Y.T}), "input 'y': expected f32[4, 6], got float32[6, 4]"),
    "objects": (archive_bytes({"x": np.array([{}], object), "y": Y}), "no plain array"),
    "a record": (forged({"x.npy": claimed([("a", "<f4")], SHAPE, bytes(96)), "y.npy": npy(Y)}), "got [('a', '<f4')][4, 6]"),
    "a negative size": (forged({"x.npy": claimed("<f4", (-4, -6), bytes(96)), "y.npy": npy(Y)}), "no plain array"),
    "a shape that is none": (forged({"x.npy": claimed("<f4", ("a",), bytes(96)), "y.npy": npy(Y)}), "array 'x'"),
    "a huge header": (forged({"x.npy": claimed("<f4", (1,) * 9000), "y.npy": npy(Y)}), "array 'x'"),
    "a deep header": (forged({"x.npy": claimed("<f4", SHAPE).replace(b"(4, 6)", b"(" * 3000 + b")" * 3000), "y.npy": npy(Y)}), "array 'x'"),
    "a third format": (forged({"x.npy": npy(X).replace(b"NUMPY\x01", b"NUMPY\x03"), "y.npy": npy(Y)}), "its format is 3.0"),
    "bzip2": (forged({"x.npy": npy(X), "y.npy": npy(Y)}, zipfile.ZIP_BZIP2), "compressed in a way"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_one_line(command, name):
    command(program()).refuses(*BAD_INPUTS[name])


def test_no_inputs_at_all_are_one_line(command):
    command(program()).refuses(None, "missing ['x', 'y']")


def test_truth_values_are_0_or_1(command):
    wrong = forged({"x.npy": claimed("|b1", SHAPE, b"\2" * 24), "y.npy": npy(np.zeros(SHAPE, bool))})
    command(program(dtype=PRED)).refuses(wrong, "not all 0 or 1")


@pytest.mark.parametrize("claims", [(4, 6), (25_000_000,)], ids=["as the signature", "as its size"])
def test_a_member_that_inflates_a_thousandfold_is_refused_before_it_is_inflated(command, claims):
    """Two members of 100 MB in a file of 200 kB: what is held while it is refused stays near the file's own size."""
    bomb = claimed("<f4", claims, bytes(10**8))
    content = forged({"x.npy": bomb, "y.npy": bomb})
    called = command(program())
    tracemalloc.start()
    try:
        called.refuses(content, "x")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(content)
    finally:
        tracemalloc.stop()


def test_weights_that_inflate_a_thousandfold_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuflow.archives.ALWAYS_READ_BYTES", 2**20)
    assert ALWAYS_READ_BYTES > 2**20
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(2**20, np.float32))
    with pytest.raises(WeightsError, match=r"claim to hold arrays of 4194304 bytes; expected at most 100 times"):
        load_state_dict(tmp_path / "w.npz")
    np.savez_compressed(tmp_path / "w.npz", a=np.random.default_rng(0).standard_normal(2**20))
    assert load_state_dict(tmp_path / "w.npz")["a"].shape == (2**20,)


# --- arrays as they were ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write", [np.savez, np.savez_compressed, lambda path, **a: write_arrays(path, a)], ids=["savez", "compressed", "ours"]
)
def test_every_array_comes_back_bit_for_bit(tmp_path, write):
    rng = np.random.default_rng(0)
    content = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32), "f16": rng.standard_normal(7).astype(np.float16), "scalar": np.array(3),
        "empty": np.zeros((0, 4), np.int8), "bool": np.array([True, False]), "fortran": np.asfortranarray(rng.standard_normal((3, 4, 5))),
        "big": np.arange(9, dtype=">i4"), "a/b c/ü": np.arange(3, dtype=np.uint8), "": np.ones(1),
    }  # fmt: skip
    write(tmp_path / "a.npz", **content)
    with Archive(tmp_path / "a.npz") as archive:
        found = archive.read_all()
        assert {n: (h.shape, h.dtype) for n in found if (h := archive.header(n))} == {n: (a.shape, a.dtype) for n, a in content.items()}
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in content.items()
    }
    with np.load(tmp_path / "a.npz") as loaded:
        assert all(loaded[n].tobytes() == a.tobytes() for n, a in content.items()), "NumPy reads it as well"


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.uint16], ids=["as ml_dtypes stores it", "as its bits"])
def test_bfloat16_gets_its_type_back(command, stored):
    given = {name: a.view(stored) for name, a in arrays(ml_dtypes.bfloat16).items()}
    status, said, written = command(program(dtype=BF16)).run(archive_bytes(given))
    assert status == 0, said
    out = np.load(io.BytesIO(written))["out"].view(ml_dtypes.bfloat16)
    x, y = arrays(ml_dtypes.bfloat16).values()
    assert out.tobytes() == (x + y).tobytes()


def test_equal_arrays_give_equal_bytes_and_a_failed_write_keeps_what_was_there(tmp_path):
    for name in ("a.npz", "b.npz"):
        write_arrays(tmp_path / name, arrays())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with pytest.raises(ValueError, match="pickle"):
        write_arrays(tmp_path / "a.npz", {"x": X, "y": np.array([{}], object)})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes() and len(os.listdir(tmp_path)) == 2


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        write_arrays(tmp_path / "pipe", arrays())
        assert reader.stdout is not None
        assert np.load(io.BytesIO(reader.stdout.read()))["x"].tobytes() == X.tobytes()
    assert not (tmp_path / "pipe").is_file() and len(os.listdir(tmp_path)) == 1


# --- names of ports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "args", "kwds", "", "allow_pickle", "params/Dense_0/kernel", "state['w']", "ü", ".."])
def test_any_honest_name_of_an_output_is_written(command, name):
    status, said, written = command(program(name)).run(archive_bytes(arrays()))
    assert status == 0, said
    assert np.load(io.BytesIO(written))[name].tobytes() == (X + Y).tobytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../../evil", "leads out of the folder"),
        ("a/../../evil", "leads out of the folder"),
        ("/etc/evil", "leads out of the folder"),
        ("..\\evil", "leads out of the folder"),
        ("\\evil", "leads out of the folder"),
        ("C:evil", "leads out of the folder"),
        ("a\ud800", r"'a\ud800' cannot be written to an .npz file: its name is no Unicode text"),
        ("a\0b", "NUL"),
        ("x" * 70_000, "(70000 characters) cannot be written"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_name_that_is_none_for_a_file_is_refused_before_the_program_runs(command, name, words, monkeypatch):
    called = command(program(name))
    monkeypatch.setattr("tpuflow.device.runtime.Executable.launch", None)
    called.refuses(archive_bytes(arrays()), words)


def test_two_ports_of_one_name_are_refused_and_lose_nothing_silently(command, tmp_path):
    command(program("same", "same")).refuses(
        archive_bytes(arrays()), "output 'same' cannot be written to an .npz file: its name occurs twice"
    )
    from tpuflow.device.runtime import Executable

    with pytest.raises(LaunchError, match=r"outputs \['same'\] of the program have a name more than once: use launch"):
        Executable(program("same", "same"), engine="reference").run(arrays())
    made = map_program(SHAPE)
    twins = replace(made, inputs=tuple(replace(port, name="x") for port in made.inputs))
    with pytest.raises(LaunchError, match=r"inputs \['x'\] of the program have a name more than once"):
        Executable(twins, engine="reference").run({"x": X})
    outputs, _ = Executable(twins, engine="reference").launch([X, Y])
    assert outputs[0].tobytes() == (X + Y).tobytes()


def test_every_command_shows_a_name_that_the_terminal_cannot(tmp_path):
    """Lone surrogates and, in a terminal of ASCII, any other letter."""
    save(program("a\ud800ü"), tmp_path / "p.tpx")
    write_arrays(tmp_path / "in.npz", arrays())
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for words in (["info", "p.tpx"], ["disassemble", "p.tpx"], ["run", "p.tpx", "--inputs", "in.npz", "--engine", "reference"]):
        done = subprocess.run([sys.executable, "-m", "tpuflow", *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "a\\u" in done.stdout


def test_text_that_is_none_is_one_line(tmp_path, capsys):
    (tmp_path / "p.txt").write_bytes(b"tpx 3.0\n\xff")
    assert cli.main(["assemble", str(tmp_path / "p.txt"), "-o", str(tmp_path / "p.tpx")]) == 2
    assert capsys.readouterr().err == f"tpuflow assemble: {tmp_path / 'p.txt'}: not the text of a program: byte 8 is not UTF-8.\n"


def test_python_m_tpuflow_is_the_command_line(tmp_path):
    save(program(), tmp_path / "p.tpx")
    ours = subprocess.run([sys.executable, "-m", "tpuflow", "info", "p.tpx"], cwd=tmp_path, capture_output=True, text=True)
    script = "import sys; from tpuflow.cli import main; sys.exit(main(['info', 'p.tpx']))"
    installed = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ours.returncode == 0 and ours.stdout == installed.stdout and "output   out: f32[4, 6]" in ours.stdout
    wrong = subprocess.run([sys.executable, "-m", "tpuflow", "info", "none.tpx"], cwd=tmp_path, capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("tpuflow info: ")
    helped = subprocess.run([sys.executable, "-m", "tpuflow", "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and helped.stdout.startswith("usage: tpuflow ")


# --- random damage ----------------------------------------------------------------------------------------------------


def _cut(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: rng.integers(len(content))]


def _repeat(content: bytes, rng: np.random.Generator) -> bytes:
    first, last = sorted(rng.integers(len(content), size=2))
    return content[:last] + content[first:]


MUTATIONS = (flipped, _cut, _repeat)
VALUES = (
    "<f4",
    "<f8",
    ">f4",
    "|O",
    "|V4",
    "|S0",
    "<U1",
    "<M8",
    "<f4,<f4",
    (4, 6),
    (6, 4),
    (24,),
    (2**62, 2**62),
    (-1,),
    (),
    (4, 6.0),
    None,
    True,
    {},
    "x" * 99,
)


def mutant(rng: np.random.Generator) -> bytes:
    """An archive of x and y: damaged as a file, or damaged within its members and packed anew with checksums that are right."""
    members = {"x.npy": npy(X), "y.npy": npy(Y)}
    kind = rng.integers(4)
    if kind == 0:
        return MUTATIONS[rng.integers(len(MUTATIONS))](archive_bytes(arrays()), rng)
    name = ("x.npy", "y.npy")[rng.integers(2)]
    if kind == 1:
        members[name] = MUTATIONS[rng.integers(len(MUTATIONS))](members[name], rng)
    if kind == 2:
        descr, shape = (VALUES[i] for i in rng.integers(len(VALUES), size=2))
        members[name] = claimed(descr, shape, X.tobytes(), (b"\x01\0", b"\x02\0", b"\x09\0")[rng.integers(3)])
    if kind == 3:
        members[f"{name}{' ' * rng.integers(2)}"] = members.pop(name)
        members[flipped(name.encode(), rng).decode("latin-1")] = npy(X)
    return forged(members, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[rng.integers(2)])


@pytest.mark.slow
def test_a_forged_archive_is_read_as_it_says_or_refused_in_one_line(command):
    called = command(program())
    status, _, whole = called.run(archive_bytes(arrays()))
    assert status == 0
    rng = np.random.default_rng(0)
    refused = same = 0
    for number in range(MUTANTS):
        content = mutant(rng)
        status, said, written = called.run(content)
        if status == 0:
            with np.load(io.BytesIO(content)) as given:  # where NumPy reads it too, it reads the same
                assert np.load(io.BytesIO(written))["out"].tobytes() == (given["x"] + given["y"]).tobytes(), number
            same += written == whole
            continue
        assert status == 2 and not written, number
        assert said.startswith("tpuflow run: ") and said.count("\n") == 1 and len(said) < 1000, said
        refused += 1
    assert refused > MUTANTS // 2 and same > 5, (refused, same)


def test_an_archive_is_closed_when_it_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"nothing")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(20):
        with pytest.raises(ArchiveError):
            Archive(tmp_path / "a.npz")
    assert not before or len(os.listdir("/proc/self/fd")) <= before
