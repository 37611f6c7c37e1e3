"""The simulated device as a backend of stock JAX: scripts that know nothing of it, in processes of their own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.entry_points import installed
from tests.pjrt_cases import CASES, computed
from tests.quick import FLAGS
from tests.test_foreign_calls import doubled
from tpuflow.device.fast.host import PinnedHost
from tpuflow.errors import ConfigError, LaunchError
from tpuflow.jaxprs.plugins import cpu_device
from tpuflow.pjrt.buffer import (
    EXTERNAL_REFERENCES,
    BufferType,
    BufferTypes,
    add_external_reference,
    array_of,
    delete,
    drop_external_reference,
    type_of,
)
from tpuflow.pjrt.cells import Pointer
from tpuflow.pjrt.device import Client
from tpuflow.pjrt.fields import CONSTANTS, FIELDS, NOTHING_TO_DO
from tpuflow.pjrt.handles import NATIVE, OBJECTS, WORDS, destroy
from tpuflow.pjrt.native import ROOM, Native
from tpuflow.pjrt.settings import Settings
from tpuflow.pjrt.shim import COMPILERS, compiled
from tpuflow.pjrt.table import _code, _known

REPOSITORY = Path(__file__).parents[1]
SMALL = "import jax, jax.numpy as jnp; f = jax.jit(lambda x: jnp.sin(x) @ x); print(float(f(jnp.ones((8, 8))).sum()))"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    plugins = installed(tmp_path_factory.mktemp("plugins"), "jax_plugins")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPUFLOW_"))}
    return kept | {"PYTHONPATH": os.pathsep.join((plugins, str(REPOSITORY))), "JAX_PLATFORMS": "tpusim", "XLA_FLAGS": FLAGS}


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(environment: dict[str, str], *arguments: str) -> tuple[str, str]:
    process = start(environment, *arguments)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    return out, err


@pytest.fixture(scope="module")
def ran(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """One process: the facts it printed, the arrays it computed, and the report it left."""
    folder = tmp_path_factory.mktemp("ran")
    arrays, report = folder / "arrays.npz", folder / "report.json"
    out, _ = run(environment | {"TPUFLOW_DEVICES": "2", "TPUFLOW_REPORT": str(report)}, "-m", "tests.pjrt_checks", str(arrays))
    return json.loads(out.splitlines()[-1]), np.load(arrays), json.loads(report.read_text())


@pytest.fixture(scope="module")
def facts(ran: Any) -> dict[str, Any]:
    return ran[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_stock_program_computes_what_it_does_on_the_cpu(ran, name):
    close, expected = CASES[name][0], computed(name)
    for i, x in enumerate(expected):
        found = ran[1][f"{name} {i}"]
        assert found.dtype == x.dtype and found.shape == x.shape
        if close:
            assert np.abs(found - x).max() <= close * max(1.0, np.abs(x).max()), i
        else:
            np.testing.assert_array_equal(found, x)


@pytest.mark.slow
def test_jax_finds_the_devices_that_were_asked_for(facts):
    names, default, kind, no_cpu = facts["devices"]
    assert names == ["TpuSimDevice(id=0, chip=generic)", "TpuSimDevice(id=1, chip=generic)"]
    assert (default, kind) == ("tpusim", "tpuflow generic")
    assert no_cpu.startswith("RuntimeError")  # and all of this ran without JAX's CPU backend


@pytest.mark.slow
def test_host_arrays_of_any_strides_come_back_as_they_were(facts):
    assert all(facts["strides"])
    assert facts["host_memory_is_copied"] == 0.0


@pytest.mark.slow
def test_donated_arrays_are_gone_and_others_are_not(facts):
    gone, kept, total, same, error = facts["donation"]
    assert (gone, kept, total, same) == (True, False, 16.0, 8.0)
    assert "deleted" in error or "donated" in error
    assert facts["the_same_array_twice"] == [16.0, 24.0]


@pytest.mark.slow
def test_what_python_lets_go_of_leaves_the_device(facts):
    before, between, after, end, limit, peak = facts["memory_is_given_back"]
    assert between - before == 8000 and after == before and end - before <= 4000
    assert limit == 16 * 2**30 and peak >= between


@pytest.mark.slow
def test_devices_run_programs_of_their_own(facts):
    places, sums, moved, moved_sum = facts["devices_side_by_side"]
    assert (places, sums, moved, moved_sum) == ([0, 1], [0.0, 8.0], 0, 8.0)


@pytest.mark.slow
def test_an_error_has_its_code_and_our_text_and_the_process_lives_on(facts):
    errors = facts["errors"]
    assert "UNIMPLEMENTED" in errors["no such type"] and "the device has no such elements" in errors["no such type"]
    assert "UNIMPLEMENTED" in errors["no rule"] and "nowhere" in errors["no rule"] and "pjrt_checks.py" in errors["no rule"]
    assert "RESOURCE_EXHAUSTED" in errors["too large to compile"] and "Traceback" not in errors["too large to compile"]
    assert "INVALID_ARGUMENT: compiler_options: No such compile option: 'xla_embed_irr'. " in errors["no such option"]
    assert errors["an option"] == 2.0 and errors["alive"] == 3.0
    assert facts["exceptions_survive_what_dies_with_them"]


@pytest.mark.slow
def test_matrices_are_factored_and_transformed(facts):
    assert all(error < 1e-5 for error in facts["factorisations"].values()), facts["factorisations"]


@pytest.mark.slow
def test_analyses_are_those_of_the_program(facts):
    found = facts["analyses"]
    assert found["flops"] == 2 * 64**3 and found["ordered"] and found["code"]
    assert found["arguments"] == found["outputs"] == 4 * 64**2 and found["peak"] >= 2 * 4 * 64**2


@pytest.mark.slow
def test_arrays_lie_at_the_host_within_a_program(facts):
    assert facts["arrays_at_the_host"] == [4 * 64, 2.0 * 64]


@pytest.mark.slow
def test_a_device_has_the_host_s_memory_too(facts):
    assert facts["the_host_s_memory_is_one_of_the_device_s"] == {
        "kinds": ["device", "pinned_host"],
        "default": "device",
        "HBM": 0,
        "gone": True,
        "arrays": ["pinned_host", "device", "pinned_host"],
        "values": [128.0, 128.0, 192.0],
    }


@pytest.mark.slow
def test_an_executable_survives_its_bytes(facts):
    assert facts["a_serialized_executable_runs"] == [4.0, "4j"]


@pytest.mark.slow
def test_settings_and_traces_of_the_caller_are_not_the_devices(facts):
    sums, nan = facts["callers_settings_do_not_matter"]
    assert sums == [36.0] * 5
    assert nan.startswith("FloatingPointError")
    assert facts["a_call_while_a_function_is_traced"] == 5.0


@pytest.mark.slow
def test_programs_call_the_host_in_order(facts):
    assert facts["printed"] == [3.0, 0.0]
    assert facts["called_in_order"] == [[1.0, 2.0, 5.0, 6.0], 6.0]


@pytest.mark.slow
def test_callbacks_tell_the_host_and_ask_it(facts):
    """What one raises is raised at the caller, and the process goes on."""
    found, seen, failed = facts["callbacks_without_results_and_with"]
    first = np.sin(np.float32(1))
    assert found == 2 and seen == [1.0, 2.0, 3.0, 2.0, first, np.sin(first), 1.0]
    assert failed.startswith("JaxRuntimeError") and "ValueError: three" in failed


@pytest.mark.slow
def test_tokens_are_no_arrays(facts):
    assert "Cannot convert a token-shape buffer to a numpy array" in facts["tokens_have_no_values"]


@pytest.mark.slow
def test_threads_share_the_device(facts):
    assert facts["threads"] == [[], False]


@pytest.mark.slow
def test_the_report_names_what_ran_how_often_and_for_how_long(ran):
    report = ran[2]
    step = next(p for p in report["programs"] if p["name"] == "step")
    assert step["runs"] == 20 and 0 < step["device_seconds"] < step["seconds"] and step["peak_bytes"] > 0
    assert report["seconds"] == pytest.approx(sum(p["runs"] * p["seconds"] for p in report["programs"]))
    assert len(report["array_peak_bytes"]) == 2


@pytest.mark.slow
def test_threads_find_no_wrong_value_and_processes_end_as_they_chose_while_threads_use_the_device(environment):
    """At full size: `python -m bench.pjrt_stress`."""
    run(environment, "-m", "bench.pjrt_stress", "--operations", "1200", "--exits", "12")


def test_threads_that_launch_first_at_once_install_the_shim_once(environment):
    """A second installation took the first one's entry for Python's, which then called itself for ever."""
    code = """
import os, threading, time, jax, numpy as np
import tpuflow.pjrt.shim as shim
threading.Timer(100, os._exit, (1,)).start()
made, find, at_once = [], shim.compiled, threading.Barrier(4)
def slowly():
    made.append(1)
    time.sleep(0.5)
    return find()
shim.compiled = slowly
def work(i):
    f = jax.jit(lambda x: x * 2 + i)
    at_once.wait()
    for _ in range(3):
        assert np.asarray(f(np.ones(3, np.float32)))[1] == 2 + i
workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for w in workers: w.start()
for w in workers: w.join()
print(len(made), flush=True)
os._exit(0)
"""
    assert run(environment, "-c", code)[0] == "1\n"


def test_an_interrupt_in_an_entry_of_which_nobody_hears_errors_is_told_by_the_next(environment):
    code = """
import jax, tpuflow.pjrt.entries.devices as devices
def interrupted():
    devices.collect = collect
    raise KeyboardInterrupt
collect, devices.collect = devices.collect, interrupted
try:
    jax.jit(lambda x: x + 1)(1.0)
except jax.errors.JaxRuntimeError as error:
    print(devices.collect is collect, "Ctrl-C" in str(error))
print(jax.jit(lambda x: x + 1)(1.0))
"""
    assert run(environment, "-c", code)[0] == "True True\n2.0\n"


def test_an_interrupt_that_is_heard_is_told_once(environment):
    code = """
import jax, tpuflow.pjrt.entries.devices as devices, tpuflow.pjrt.table as table
told, make = [], table.PjrtError
table.PjrtError = lambda error: told.append(type(error)) or make(error)
x = jax.jit(lambda x: x + 1)(1.0)
def interrupted():
    devices.collect = collect
    raise KeyboardInterrupt
collect, devices.collect = devices.collect, interrupted
try:
    jax.devices()[0].memory_stats()
except jax.errors.JaxRuntimeError as error:
    print("Ctrl-C" in str(error))
print(jax.jit(lambda x: x + 2)(x), told.count(KeyboardInterrupt))
"""
    assert run(environment, "-c", code)[0] == "True\n4.0 1\n"


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_none_of_six_ends_badly(environment, tmp_path):
    cached = environment | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TPUFLOW_DEBUG": "1",
    }
    out, err = run(cached, "-c", SMALL)
    assert "tpuflow: _lambda" in err
    others = [start(cached, "-c", SMALL) for _ in range(5)]
    for process in others:
        assert process.communicate(timeout=300) == (out, "") and process.returncode == 0


def test_who_does_not_ask_pays_nothing_and_notices_nothing(environment):
    quiet = {k: v for k, v in environment.items() if k != "JAX_PLATFORMS"} | {"TPUFLOW_CHIP": "nonsense"}
    code = "import sys, jax; print(jax.default_backend(), float((jax.numpy.ones(3) + 1).sum()), 'tpuflow.compiler' in sys.modules)"
    out, err = run(quiet, "-c", code)
    assert (out, err) == ("cpu 6.0 False\n", "")


def test_the_device_beside_the_cpu_is_used_where_it_is_asked_for(environment):
    """As the guide does it."""
    piece, _ = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "pjrt.md").read_text(encoding="utf-8"), re.S)
    before = "import numpy as np, warnings; warnings.simplefilter('ignore'); x = z = np.ones(3, np.float32); f = lambda x: x + 1\n"
    after = """
import jax.numpy as jnp
back = jax.device_put(x, jax.devices("cpu")[0])
print(device.platform, device.device_kind, *(a.device.platform for a in (x, x + 1, y, jnp.ones(3))), back + 1)
"""
    beside = {k: v for k, v in environment.items() if k != "JAX_PLATFORMS"} | {"TPUFLOW_CHIP": "tpu-v4", "TPUFLOW_FIDELITY": "bitexact"}
    out, _ = run(beside, "-c", before + piece + after)
    assert out == "tpusim tpuflow tpu-v4 tpusim tpusim tpusim cpu [2. 2. 2.]\n"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TPUFLOW_CHIP", "tpu-v44", "Did you mean"),
        ("TPUFLOW_FIDELITY", "exact", "bitexact"),
        ("TPUFLOW_SHIM", "0", "on, off"),
        ("TPUFLOW_DEVICES", "0", "from 1 to"),
        ("TPUFLOW_POLICY", "mixd", "Did you mean 'mixed'"),
        ("TPUFLOW_POLICY", "bf16", "expected fp32, mixed, mixed_bf16"),
    ],
)
def test_a_wrong_environment_is_told_to_who_uses_the_device(environment, variable, value, said, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=said) as raised:
        Settings.from_environment().check()
    assert variable in str(raised.value) and value in str(raised.value)


@pytest.mark.parametrize("policy, rounded", [("", 1 + 2**-12), ("fp32", 1 + 2**-12), ("mixed", 1.0), ("mixed_bf16", 1.0)])
def test_a_policy_rounds_the_operands_of_products_and_keeps_types(environment, policy, rounded):
    """In a program, and in an operation by itself; sums and types stay."""
    code = """
import jax, jax.numpy as jnp
x, one = jnp.full((1, 1), 1 + 2.0**-12), jnp.ones((1, 1))
product = jax.jit(lambda x, y: (x @ y, x + y))(x, one)
print(*(float(y) for y in (product[0][0, 0], (x @ one)[0, 0], product[1][0, 0])), *{str(y.dtype) for y in product}, jax.devices()[0].policy)
"""
    out, err = run(environment | {"TPUFLOW_POLICY": policy}, "-c", code)
    assert (out.split(), err) == ([str(rounded), str(rounded), str(2 + 2**-12), "float32", policy or "fp32"], "")


def test_a_policy_has_programs_of_its_own_in_the_persistent_cache(environment, tmp_path):
    code = "import jax; x = jax.numpy.full((1, 1), 1 + 2.0**-12); print(float(jax.jit(lambda x: x @ x.T)(x)[0, 0]) > 1)"
    kept = environment | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert [run(kept | {"TPUFLOW_POLICY": p}, "-c", code)[0] for p in ("fp32", "mixed", "fp32", "mixed")] == ["True\n", "False\n"] * 2


def test_what_a_call_of_the_client_underneath_returns_is_there_and_a_failure_is_the_calls():
    """So nobody waits for it."""
    host = PinnedHost(cpu_device())
    function = host.jit(lambda x, none, nothing: [x @ x], {}, lambda *arguments: 0)
    (product,) = function(host.array(np.ones((1500, 1500), np.float32)), None, [])
    assert product.is_ready()
    failing = host.jit(lambda x, none, nothing: [doubled("numbers", jax.typeof(x), x)], {}, lambda *arguments: 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no numbers"):
        failing(host.array(np.ones(3, np.float32)), None, [])


def test_what_looks_for_nan_finds_the_users_and_in_programs_that_call_the_host_too(environment):
    code = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_debug_nans", True)
def f(x):
    zeros = jax.pure_callback(lambda x: np.zeros_like(x), jax.ShapeDtypeStruct((4,), jnp.float32), x)
    return zeros / zeros
for function in (f, lambda x: (x - x) / (x - x)):
    try: print(jax.jit(function)(jnp.ones(4)))
    except FloatingPointError as error: print(error)
"""
    said = [line for line in run(environment, "-c", code)[0].splitlines() if "de-optimized" not in line]
    assert said == ["invalid value (nan) encountered in div"] * 2


def test_buffers_of_one_call_give_their_memory_back_each_once():
    client = Client(Settings.from_environment())
    device = client.devices[0]
    arrays = [np.zeros(n, np.float32) for n in (1, 2, 3)]
    group = BufferTypes([BufferType(device.memory, 11, x.shape, x.nbytes) for x in arrays]).new([*arrays])
    first, second, third = group.handles
    assert device.memory.usage.in_use == 24 and type_of(third).shape == (3,) and array_of(third) is arrays[2]
    add_external_reference(second)
    delete([first, second, first])
    assert device.memory.usage.in_use == 12 and EXTERNAL_REFERENCES[second][1] is arrays[1]  # who looks at it still can
    with pytest.raises(LaunchError, match="deleted, or donated"):
        array_of(second)
    drop_external_reference(second)
    destroy([third, second])
    assert OBJECTS[group.first] is group
    destroy([first, client.handle])
    assert device.memory.usage.in_use == 0 and not EXTERNAL_REFERENCES
    assert OBJECTS.keys().isdisjoint([first, client.handle, device.handle, *(m.handle for m in device.memories)])


def test_a_host_without_machine_code_computes_the_same(environment):
    other = "import platform; platform.machine = lambda: 'riscv64'\nfrom tpuflow.pjrt.handles import NATIVE; print(NATIVE)\n"
    assert run(environment, "-c", other + SMALL)[0].split() == ["None", *run(environment, "-c", SMALL)[0].split()]


def launch_facts(environment: dict[str, str], **settings: str) -> tuple[dict[str, Any], dict[str, tuple[int, bool]]]:
    """What tests/pjrt_launches.py found; and of each Program how often it ran, and whether C launches it."""
    found = json.loads(run(environment | settings, "-m", "tests.pjrt_launches")[0])
    return found, found.pop("launches")


@pytest.fixture(scope="module")
def launched_by_python(environment: dict[str, str]) -> tuple[dict[str, Any], dict[str, tuple[int, bool]]]:
    return launch_facts(environment, TPUFLOW_SHIM="off")


def test_calls_after_the_first_do_what_it_did(launched_by_python):
    found, launches = launched_by_python
    assert found["values"][1:] == [True, True] and found["calls_of_the_host"] == [0.0, 1.0, 2.0]
    results, deleted, *errors = found["donation"]
    assert (results, deleted) == ([64.0, 96.0, 64.0], [True, True, False]) and all("deleted" in error for error in errors)
    assert found["an_array_that_others_look_at"] == [[64.0, 96.0, 64.0], 16.0, False, True]
    stays, *errors, deleted, total = found["memory"]
    assert (stays, deleted, total) == (0, False, 48.0) and all("RESOURCE_EXHAUSTED" in error for error in errors)
    assert found["ctrl_c"] == [["CANCELLED: interrupted (Ctrl-C)"], True]
    assert found["threads"] == [[400.0, 401.0, 402.0, 403.0], True]
    assert not any(in_c for _, in_c in launches.values())


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C compiler")
def test_c_launches_as_python_does(environment, launched_by_python):
    found, launches = launch_facts(environment)
    expected, counts = launched_by_python
    assert found == expected
    assert {name: runs for name, (runs, _) in launches.items()} == {name: runs for name, (runs, _) in counts.items()}
    assert {name for name, (runs, in_c) in launches.items() if runs and not in_c} == {"told"}  # it calls the host


@pytest.mark.parametrize(("compiler", "problem"), [("false", "false: "), ("no-such-compiler", "no C compiler (no-such-compiler)")])
def test_without_a_compiler_that_works_python_launches(environment, tmp_path, compiler, problem):
    logged = "import logging; logging.basicConfig(level=logging.INFO)\n"
    out, err = run(environment | {"CC": compiler, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}, "-c", logged + SMALL)
    assert out == run(environment, "-c", SMALL)[0]
    assert f"launches are Python's: {problem}" in err
    assert not [*tmp_path.rglob("*.so")]


def test_a_shim_that_others_could_have_written_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuflow.pjrt.shim.cache_dir", lambda: tmp_path)
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim").chmod(0o777)
    with pytest.raises(OSError, match="can be written by others"):
        compiled()


@pytest.mark.skipif(NATIVE is None, reason="no machine code on this host")
@pytest.mark.parametrize("name", [*FIELDS, *CONSTANTS, *NOTHING_TO_DO])
def test_machine_code_and_python_write_the_same(name):
    assert NATIVE is not None
    code, function = _code(NATIVE.code, name), _known(name)
    assert code is not None and function is not None
    thing = (ctypes.c_uint64 * WORDS)(*range(100, 100 + WORDS))
    found, expected = ((ctypes.c_uint64 * 8)(64, 0, ctypes.addressof(thing), *[7] * 5) for _ in range(2))
    assert ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(*NATIVE.load([code]))(ctypes.addressof(found)) == 0
    function(ctypes.cast(expected, Pointer))
    assert list(found) == list(expected) and list(thing) == list(range(100, 100 + WORDS))


@pytest.mark.skipif(NATIVE is None, reason="no machine code on this host")
def test_machine_code_calls_back_without_an_error():
    assert NATIVE is not None
    called: list[tuple[int | None, int | None]] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda error, argument: called.append((error, argument)))
    given = (ctypes.c_uint64 * 5)(40, 0, 0, ctypes.cast(function, ctypes.c_void_p).value or 0, 77)
    assert ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(*NATIVE.load([NATIVE.code.call_back]))(ctypes.addressof(given)) == 0
    assert called == [(None, 77)]


@pytest.mark.skipif(NATIVE is None, reason="no machine code on this host")
@pytest.mark.parametrize("count", [0, 1, ROOM, ROOM + 1, 3 * ROOM + 7])
def test_what_is_destroyed_is_listed_last_first_however_much_it_is(count):
    native = Native()
    things = [(ctypes.c_uint64 * WORDS)() for _ in range(count)]
    for thing in things:
        arguments = (ctypes.c_uint64 * 3)(24, 0, ctypes.addressof(thing))  # has to outlive its address
        ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(native.destroy)(ctypes.addressof(arguments))
    assert native.destroyed() == list(map(ctypes.addressof, reversed(things)))
    assert native.destroyed() == []


@pytest.mark.skipif(NATIVE is None, reason="no machine code on this host")
def test_what_threads_destroy_at_once_is_listed_once():
    native = Native()
    destroy = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(native.destroy)
    things = [(ctypes.c_uint64 * WORDS)() for _ in range(4000)]
    arguments = [(ctypes.c_uint64 * 3)(24, 0, ctypes.addressof(t)) for t in things]
    listed: list[int] = []

    def work(part: int) -> None:
        for args in arguments[part::4]:
            assert destroy(ctypes.addressof(args)) == 0

    with ThreadPoolExecutor(5) as pool:
        works = [pool.submit(work, part) for part in range(4)]
        while not all(w.done() for w in works):
            listed += native.destroyed()
    assert all(w.exception() is None for w in works)
    nothing = (ctypes.c_uint64 * 3)(24, 0, 0)
    assert destroy(ctypes.addressof(nothing)) == 0  # which C may destroy
    assert sorted([*listed, *native.destroyed()]) == sorted(map(ctypes.addressof, things))
