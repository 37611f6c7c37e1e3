"""The persistent compilation cache: another process compiles nothing and computes the same bits; what is damaged or foreign is not read."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow import compiler
from tpuflow.chips import get_chip
from tpuflow.device.fast import cache, stored_executables
from tpuflow.device.runtime import Executable
from tpuflow.device.verify import kept, verify
from tpuflow.entries import MAGIC, Entries, entries_in
from tpuflow.errors import ConfigError, ProgramError
from tpuflow.isa.program import Program
from tpuflow.jaxprs import persistent
from tpuflow.lower.graph.digest import NotDataError, digest
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr

REPOSITORY = Path(__file__).parents[1]
X = np.linspace(-2, 2, 24 * 40, dtype=np.float32).reshape(24, 40)

STEP = """
import json, jax, numpy as np, tpuflow
from tpuflow import compiler
passes = []
for step in compiler.PIPELINE:
    type(step).on = lambda self, *of, on=type(step).on: passes.append(self) or on(self, *of)
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
f = tpuflow.jit(lambda x: jax.nn.softmax(x @ x.T).sum(0), chip="bm1690")
y = f(np.linspace(-2, 2, 24 * 40, dtype=np.float32).reshape(24, 40))
backend = sum(event == "/jax/core/compile/backend_compile_duration" for event in compiled)
print(json.dumps([np.asarray(y).tobytes().hex(), len(passes), backend]))
"""


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entries]:
    """An empty cache, and engines that know nothing of other tests."""
    monkeypatch.setenv("TPUFLOW_CACHE", str(tmp_path / "cache"))
    cache.clear()
    yield persistent.kept_entries() or pytest.fail("no cache")
    cache.clear()


def step(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ x.T).sum(0)


def compiled(f: Callable[..., Any] = step, chip: str = "generic") -> Program:
    return tpuflow.jit(f, chip=chip).program(X)


def files(entries: Entries) -> list[Path]:
    return sorted(entries.folder.iterdir())


def refuse(*_: Any, **__: Any) -> Any:
    pytest.fail("compiled anew")


# --- Programs ---------------------------------------------------------------------------------------------------------


def test_a_program_that_is_kept_is_the_one_that_was_compiled(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    first = compiled()
    (file,) = files(entries)
    assert file.stat().st_mode & 0o077 == 0 and file.name.startswith("program-")
    monkeypatch.setattr(compiler, "_compile_graph", refuse)
    assert compiled() == first


def test_what_matters_to_a_program_is_in_its_key(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    def other(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x @ x.T).sum(1)

    compiled()
    compiled(chip="bm1690")
    compiled(tpuflow.autocast(step, "mixed"))
    compiled(other)
    compiled(lambda x: x + jnp.asarray(np.arange(40.0, dtype=np.float32)))
    compiled(lambda x: x + jnp.asarray(np.arange(40.0, dtype=np.float32) * 2))
    tpuflow.jit(step, donate_argnums=0).program(X)
    assert len(files(entries)) == 7
    monkeypatch.setattr(persistent, "_code", lambda: b"another tpuflow")
    compiled()
    assert len(files(entries)) == 8


def test_two_chips_of_one_name_are_two(entries: Entries):
    chip = get_chip("generic")
    for row in (chip, dataclasses.replace(chip, hbm_bytes=chip.hbm_bytes // 2)):
        tpuflow.jit(step, chip=row).program(X)
    assert len(files(entries)) == 2


def test_what_is_no_plain_data_has_no_key():
    graph = lower_jaxpr(jax.make_jaxpr(step)(X), "step")
    assert digest(graph) == digest(lower_jaxpr(jax.make_jaxpr(step)(X), "step"))
    with pytest.raises(NotDataError, match="function"):
        digest(graph, lambda: 0)


def test_one_and_true_and_1_0_and_a_string_have_different_bytes():
    graph = lower_jaxpr(jax.make_jaxpr(step)(X), "step")
    values: tuple[Any, ...] = (1, True, 1.0, "1", (1,), np.float32(1), np.array(1), np.array(1.0), -0.0, 0.0, None)
    assert len({digest(graph, value) for value in values}) == len(values)


def test_programs_that_call_the_host_are_not_kept(entries: Entries):
    def telling(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return x

    compiled(telling)
    assert files(entries) == []


def test_nothing_is_kept_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("TPUFLOW_CACHE", raising=False)
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert persistent.kept_entries() is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert (found := persistent.kept_entries()) is not None and found.folder == tmp_path / "tpuflow"
        monkeypatch.setenv("TPUFLOW_CACHE", "off")
        assert persistent.kept_entries() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


# --- executables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["native", "bitexact"])
def test_an_executable_that_is_kept_gives_the_same_bits_and_knows_its_tiers(
    fidelity: str, entries: Entries, monkeypatch: pytest.MonkeyPatch
):
    def run() -> tuple[bytes, dict[str, int]]:
        function = tpuflow.jit(step, fidelity=fidelity).lower(X).compile()
        return np.asarray(function(X)).tobytes(), function.executable.tiers

    first = run()
    assert first[1] and [file.name.partition("-")[0] for file in files(entries)] == ["executable", "program", "verified"]
    cache.clear()
    monkeypatch.setattr(stored_executables, "executable_bytes", refuse)
    assert run() == first


@pytest.mark.slow
def test_a_training_goes_on_from_what_is_kept_with_the_same_losses(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    x, y = X, (np.arange(24) % 3).astype(np.int32)

    def losses() -> list[float]:
        from models.mlp import MLP

        return tpuflow.train(MLP((8,), 3), (x, y), policy="mixed", batch_size=5, epochs=2, progress=False).losses

    first, kept_files = losses(), files(entries)
    cache.clear()
    monkeypatch.setattr(compiler, "_compile_graph", refuse)
    monkeypatch.setattr(stored_executables, "executable_bytes", refuse)
    assert losses() == first and files(entries) == kept_files


def test_what_is_kept_is_launched_without_jaxs_dispatch_like_anything_else(entries: Entries):
    x, found = jnp.asarray(X), []
    for _ in range(2):  # compiled, then taken from the cache
        cache.clear()
        executable = Executable(compiled())
        first = executable.launch([x])[0]
        launch = executable.launcher([x])
        assert launch != executable.launch_fitting
        found += [first, launch([x]), launch([x])]
    assert len({np.asarray(y).tobytes() for (y,) in found}) == 1 and len({(y.aval, y.sharding) for (y,) in found}) == 1
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        launch([x * np.nan])


def test_what_jax_has_in_its_own_cache_is_compiled_for_ours(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    """XLA does not write whole again what it has read: JAX's entries (of these tests' own folder) cannot become ours."""
    monkeypatch.setenv("TPUFLOW_CACHE", "off")
    expected = np.asarray(tpuflow.jit(step)(X))
    for _ in range(2):
        monkeypatch.setenv("TPUFLOW_CACHE", str(entries.folder))
        cache.clear()
        jax.clear_caches()
        np.testing.assert_array_equal(tpuflow.jit(step)(X), expected)
    assert [file.name.partition("-")[0] for file in files(entries)] == ["executable", "program", "verified"]


def test_what_was_verified_is_not_verified_again_and_anything_else_is(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    program, verified = compiled(), []
    monkeypatch.setattr(kept, "verify", lambda p: verified.append(p) or verify(p))
    faulty = dataclasses.replace(program, buffers=program.buffers[:-1])
    for engine in ("fast", "reference", "fast"):
        Executable(program, engine)
    assert verified == [program]
    for _ in range(2):
        with pytest.raises(ProgramError):
            Executable(faulty)
    Executable(dataclasses.replace(program, chip=dataclasses.replace(program.chip, clock_hz=2e9)), "reference")
    assert len(verified) == 4
    monkeypatch.setattr(persistent, "_code", lambda: b"another tpuflow")
    Executable(program)
    monkeypatch.setenv("TPUFLOW_CACHE", "off")
    Executable(program)
    assert len(verified) == 6


def test_a_program_with_functions_of_its_process_is_always_verified(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    def calling(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    program, verified = compiled(calling), []
    monkeypatch.setattr(kept, "verify", verified.append)
    Executable(program)
    Executable(program)
    assert verified == [program, program] and files(entries) == []


def test_a_donated_argument_is_given_away_by_what_is_kept(entries: Entries):
    def call() -> bool:
        x = jnp.asarray(X)
        tpuflow.jit(lambda x: x * 2, donate_argnums=0)(x)
        return x.is_deleted()

    first = call()
    cache.clear()
    assert call() == first


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_computes_the_same_bits(tmp_path: Path):
    environment = {**os.environ, "TPUFLOW_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(REPOSITORY)}

    def process() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", STEP], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(running: subprocess.Popen[str]) -> Any:
        out, err = running.communicate(timeout=300)
        assert running.returncode == 0 and "Warning" not in err, err
        return json.loads(out)

    both = [process(), process()]  # at once, into the same folder
    (bits, passes, backend), (others, more_passes, more_backend) = map(result, both)
    assert bits == others and passes + more_passes and backend + more_backend
    assert result(process()) == [bits, 0, 0]


# --- what is wrong with entries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["program", "executable", "verified"])
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:]],
    ids=["cut", "empty", "a bit"],
)
def test_a_damaged_entry_is_ignored_with_a_warning_and_written_anew(kind: str, damage: Callable[[bytes], bytes], entries: Entries):
    expected = np.asarray(tpuflow.jit(step)(X))
    (file,) = [file for file in files(entries) if file.name.startswith(kind)]
    good = file.read_bytes()
    file.write_bytes(damage(good))
    cache.clear()
    with pytest.warns(RuntimeWarning, match=r"damaged: .* ignored, and written anew"):
        np.testing.assert_array_equal(tpuflow.jit(step)(X), expected)
    assert file.read_bytes()[: len(MAGIC)] == MAGIC and len(file.read_bytes()) > len(good) // 2
    cache.clear()
    with warnings.catch_warnings(action="error"):
        tpuflow.jit(step)(X)


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff", b"\x02\0\0\0{}", b"cos\nsystem\n(S'touch forged'\ntR."])
def test_an_entry_whole_but_of_something_else_is_ignored(content: bytes, entries: Entries, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Even one that a pickle's loader would run."""
    monkeypatch.chdir(tmp_path)
    expected = np.asarray(tpuflow.jit(step)(X))
    for file in files(entries):
        entries.put(file.stem, content)
    cache.clear()
    with pytest.warns(RuntimeWarning, match="ignored, and written anew"):
        np.testing.assert_array_equal(tpuflow.jit(step)(X), expected)
    assert not (tmp_path / "forged").exists()


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_what_others_can_write_is_not_read(entries: Entries):
    entries.put("a", b"content")
    (file,) = files(entries)
    file.chmod(0o666)
    with pytest.warns(RuntimeWarning, match=r"can be written by others \(mode 666\)"):
        assert entries.get("a") is None
    assert not file.exists()
    file.symlink_to(__file__)
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert entries.get("a") is None


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written by others \(mode 777\).*chmod 700"):
        entries_in(tmp_path / "open", 1000)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a link"):
        entries_in(tmp_path / "link", 1000)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path):
    entries = entries_in(tmp_path / "cache", 3 * 1100)
    for number, name in enumerate("abc"):
        entries.put(name, bytes(1000))
        os.utime(entries.folder / f"{name}.entry", (number, number))
    assert entries.get("a")  # used now
    entries.put("d", bytes(1000))
    assert [file.stem for file in files(entries)] == ["a", "c", "d"]
    entries.put("e", bytes(4000))
    assert [file.stem for file in files(entries)] == ["a", "c", "d"]


def test_what_a_killed_process_left_goes_and_what_is_being_written_stays(tmp_path: Path):
    entries = entries_in(tmp_path / "cache", 10_000)
    for name, used in (("old.partial", 0), ("new.partial", 2**33)):
        (entries.folder / name).write_bytes(bytes(10))
        os.utime(entries.folder / name, (used, used))
    entries.put("a", b"content")
    assert [file.name for file in files(entries)] == ["a.entry", "new.partial"]


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(entries: Entries, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(No space left on device\)"):
        compiled()
    assert files(entries) == []
