"""What every test may use: the data set, the documented logs, the initial weights, and Hypothesis settings that do not depend on luck."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before the first import of jax
# PyTorch's threads and OpenBLAS's wait for each other in loops: beside another process of the tests that took half of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.quick import quickly_compiled
from tests.warm import compiled_earlier, forget_if_many, is_warm
from tpuflow.device.fast import cache
from tpuflow.errors import ConfigError, DataError
from tpuflow.examples import data
from tpuflow.examples.exported import TORCH_SEED0
from tpuflow.numerics import operations
from tpuflow.stages import staging
from train.torch_packages import import_package

REPOSITORY = Path(__file__).parents[1]

hypothesis.settings.register_profile("tpuflow", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tpuflow")


def pytest_addoption(parser: pytest.Parser) -> None:
    """A choice between a run from scratch, as ever, and one that compiles less."""
    told = "take from .pytest_cache what XLA compiled in earlier such runs on this machine, and leave there what it compiles now"
    parser.addoption("--warm", action="store_true", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """Outside `make`, too, the data sets are looked for in a shared folder beside the checkout. Ctrl-C interrupts, also in a job of the
    background, which a shell starts deaf to it. The garbage collector comes after 10,000 new objects, not after 700, which took a twentieth
    of the time: importing, tracing and compiling make next to no cycles; what those hold is let go at the end of each file (`let_go`)."""
    gc.set_threshold(10_000)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shared = REPOSITORY.parent / "shared" / "data"
    if not os.environ.get("TPUFLOW_DATA") and shared.is_dir():
        os.environ["TPUFLOW_DATA"] = str(shared)
    if is_warm(config) and not hasattr(config, "workerinput"):
        forget_if_many(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that hold slow tests come first: at the end of a parallel run no process works alone on a long one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector, which took 0.3 s to walk through them each time, leaves them alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fashion_mnist() -> data.ImageData:
    """The whole of Fashion-MNIST. Without it the test fails: parity with the documented logs cannot be shown on other data."""
    try:
        return data.load("fashion-mnist", embedded=False)
    except DataError as error:
        problem = error
    pytest.fail(f"this test needs Fashion-MNIST. {problem}", pytrace=False)


@pytest.fixture(scope="session")
def data_dir(fashion_mnist: data.ImageData) -> Path:
    """The folder that holds the four files of Fashion-MNIST, checked."""
    return Path(fashion_mnist.origin)


@pytest.fixture(scope="session")
def documented() -> dict[str, Any]:
    """The logs of the vendor's hardware."""
    return json.loads((REPOSITORY / "train" / "documented_mnist_logs.json").read_text())


@pytest.fixture(scope="session")
def torch_seed0() -> dict[str, np.ndarray]:
    """The exported state dict of the documented PyTorch network, seed 0."""
    with np.load(TORCH_SEED0["mlp"]) as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """PyTorch, for tests marked `torch`; they fail without it rather than being skipped unseen."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        pass
    pytest.fail("this test needs PyTorch: `make test` installs it, or pip install -e '.[torch]'", pytrace=False)


@pytest.fixture(scope="session")
def transformers(torch: ModuleType) -> ModuleType:
    """transformers, whose models are built from configurations with random weights: nothing is looked for on the network."""
    try:
        module = import_package("transformers")
    except ConfigError as error:
        pytest.fail(f"{error} `make test` does so.", pytrace=False)
    module.logging.set_verbosity_error()
    return module


@pytest.fixture(scope="session")
def diffusers(transformers: ModuleType) -> ModuleType:
    """diffusers, whose models and schedulers are built from configurations: nothing is looked for on the network."""
    try:
        return importlib.import_module("diffusers")
    except ImportError:
        pass
    pytest.fail("this test needs diffusers: `make test` installs it, or pip install -e '.[torch,torch-models]'", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def compiled_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One test after the other compiles the same step: what XLA makes is kept on disk meanwhile, for all processes of a run; with --warm,
    for later runs, too. What a fault in the compiler changes has another name there, so that none is hidden. What is read while another
    process writes it is compiled instead, with a warning of JAX's."""
    kept = compiled_earlier(request.config) if is_warm(request.config) else _folder_of_run(request.config, tmp_path_factory) / "compiled"
    os.environ["TPUFLOW_CACHE"] = "off"  # ours keeps Programs, too: a test that plants a fault in the compiler would not see it
    jax.config.update("jax_compilation_cache_dir", str(kept))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # what was compiled while tests were collected has found that there is none


@pytest.fixture(scope="module", autouse=True)
def compiled_plainly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files ask what is computed, not how XLA's machine code does it, but for those marked `optimised`."""
    with nullcontext() if request.node.get_closest_marker("optimised") else quickly_compiled():
        yield


def _folder_of_run(config: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of this run, in which each of several processes has its own."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(config, "workerinput") else base


@pytest.fixture(scope="module", autouse=True)
def let_go() -> Iterator[None]:
    """What the tests of one file have compiled is let go before the next: at its end a process held up to 10 GB of it."""
    yield
    cache.clear()
    for function in (operations._compiled, staging._function):
        function.cache_clear()
    jax.clear_caches()
    gc.collect()
