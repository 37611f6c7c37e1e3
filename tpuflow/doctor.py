"""`tpuflow doctor`: checks the installation (versions, optional packages, JAX's CPU backend, the engines, caches, data), one line each."""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpuflow.errors import one_line

OK, WARN, FAIL = "ok", "warn", "fail"
PACKAGE = "tpuflow"
DEVELOPERS = "dev"
"""The extra for developing tpuflow itself, which is not checked."""
MEND = "mend what failed above, if anything did; else reinstall tpuflow"
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
_BOUND = re.compile(r"(>=|<=|==|>|<)([\d.]+)")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<bounds>[^;]*)(?:;.*extra == [\"'](?P<extra>[\w-]+)[\"'])?")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: its status (ok, warn or fail), its subject, what was found, and what to do about it."""

    status: str
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.status:4}  {self.subject:18} {self.text}{f'; {self.advice}' if self.advice else ''}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A line of the package's metadata: a distribution, the versions that will do, and the extra that asks for it ("" if all do)."""

    name: str
    bounds: str
    extra: str = ""

    def accepts(self, version: str) -> bool:
        """Whether a version lies within the bounds."""
        return all(_compared(version, sign, bound) for sign, bound in _BOUND.findall(self.bounds))


def diagnose() -> list[Finding]:
    """The findings of all checks, each after the checks of what it depends on."""
    return [finding for check in CHECKS for finding in _guarded(check)]


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if anything failed, else 0."""
    return int(any(f.status == FAIL for f in findings))


def report(findings: Iterable[Finding]) -> str:
    """A line for each finding, and the number of those that are not ok."""
    findings = list(findings)
    failed, warned = (sum(f.status == status for f in findings) for status in (FAIL, WARN))
    return "\n".join([*map(str, findings), f"{len(findings)} checks: {failed} failed, {warned} with a warning"])


def as_dicts(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The findings as plain data."""
    return [asdict(f) for f in findings]


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; any exception becomes a finding too, since a broken installation may raise anything."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(FAIL, check.__name__.strip("_").replace("_", " "), f"{type(error).__name__}: {one_line(error)}", MEND)


# --- versions ---------------------------------------------------------------------------------------------------------


def requirements() -> list[Requirement]:
    """The requirements in the installed package's metadata.

    Raises:
      importlib.metadata.PackageNotFoundError: tpuflow is used without being installed.
    """
    lines = importlib.metadata.requires(PACKAGE) or []
    found = (m.groupdict("") for line in lines if (m := _REQUIREMENT.match(line)))
    return [Requirement(m["name"], m["bounds"].strip(), m["extra"]) for m in found]


def _versions() -> Iterator[Finding]:
    """The versions of Python and of the required packages."""
    try:
        needed, python = requirements(), importlib.metadata.metadata(PACKAGE)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        yield Finding(WARN, PACKAGE, "used without being installed, so that versions cannot be judged", "pip install -e . in its folder")
        return
    yield _judged(Requirement("python", python), platform.python_version(), "use another Python")
    for requirement in needed:
        if not requirement.extra:
            yield _judged(requirement, _installed(requirement.name), f"pip install '{requirement.name}{requirement.bounds}'")


def _optional_packages() -> Iterator[Finding]:
    """The packages of the extras; one that is not installed is no failure."""
    try:
        needed = [r for r in requirements() if r.extra not in ("", DEVELOPERS)]
    except importlib.metadata.PackageNotFoundError:
        return  # said with the versions
    for extra in dict.fromkeys(r.extra for r in needed):
        group = [r for r in needed if r.extra == extra]
        versions = {r: _installed(r.name) for r in group}
        install = f"pip install '{PACKAGE}[{extra}]'"
        missing = [r.name for r, version in versions.items() if version is None]
        misfits = [f"{r.name} {version} (expected {r.bounds})" for r, version in versions.items() if version and not r.accepts(version)]
        if misfits:
            yield Finding(WARN, f"extra {extra}", ", ".join(misfits), install)
        elif missing:
            yield Finding(OK, f"extra {extra}", f"not there: {', '.join(missing)}", f"{install} if wanted")
        else:
            yield Finding(OK, f"extra {extra}", ", ".join(f"{r.name} {version}" for r, version in versions.items()))


def _judged(requirement: Requirement, version: str | None, advice: str) -> Finding:
    if version is None:
        return Finding(FAIL, requirement.name, f"not installed (expected {requirement.bounds})", advice)
    if not requirement.accepts(version):
        return Finding(FAIL, requirement.name, f"{version} (expected {requirement.bounds})", advice)
    return Finding(OK, requirement.name, f"{version} ({requirement.bounds})")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compared(version: str, sign: str, bound: str) -> bool:
    """Releases compared number by number, the shorter one with zeros at its end; what follows the numbers (rc1, +cpu) is not looked at."""
    ours, theirs = _release(version), _release(bound)
    width = max(len(ours), len(theirs))
    return _COMPARE[sign](*((*numbers, *[0] * (width - len(numbers))) for numbers in (ours, theirs)))


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# --- the host and the engines -----------------------------------------------------------------------------------------


def _host_processor() -> Iterator[Finding]:
    """The fast engine runs on JAX's CPU backend."""
    import jax

    try:
        devices = jax.devices("cpu")
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a backend was found
        platforms = os.environ.get("JAX_PLATFORMS", "")
        advice = f"JAX_PLATFORMS is {platforms!r}: unset it or add cpu" if platforms else "reinstall jaxlib"
        yield Finding(FAIL, "JAX's CPU", one_line(error), advice)
        return
    yield Finding(OK, "JAX's CPU", f"{len(devices)} device{'s' * (len(devices) != 1)}; JAX's default is {jax.default_backend()}")


def _engines() -> Iterator[Finding]:
    """A small Program, compiled here, gives the same bits on both engines."""
    import jax
    import numpy as np

    from tpuflow.compiler import compile_jaxpr
    from tpuflow.device.runtime import Executable

    def small(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.numpy.tanh(x @ w)
        return y, jax.nn.softmax(y.astype(jax.numpy.bfloat16), axis=-1).sum(0)

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((24, 40), np.float32), rng.standard_normal((40, 136), np.float32)
    program = compile_jaxpr(jax.make_jaxpr(small)(x, w), name="doctor", input_names=("x", "w"), output_names=("y", "sums"))
    fast, slow = (Executable(program, engine, "bitexact").run({"x": x, "w": w}) for engine in ("fast", "reference"))
    different = [name for name in slow if fast[name].tobytes() != slow[name].tobytes()]
    if different:
        advice = "this jaxlib computes otherwise than those tpuflow was tested with: use versions in the ranges above, and report it"
        yield Finding(FAIL, "engines", f"fast and reference differ in {', '.join(different)}", advice)
    else:
        kernels = len(list(program.kernels()))
        yield Finding(OK, "engines", f"fast equals reference bit for bit on a Program of {kernels} kernels")


def _compile_cache() -> Iterator[Finding]:
    """Where what was compiled is kept between processes, if anywhere."""
    import jax

    from tpuflow.errors import ConfigError
    from tpuflow.jaxprs.persistent import FOLDER, kept_entries

    if os.environ.get(FOLDER):
        try:
            entries = kept_entries()
            yield Finding(OK, "compile cache", "off" if entries is None else f"{entries.folder}, at most {entries.limit_bytes} bytes")
        except ConfigError as problem:
            yield Finding(WARN, "compile cache", one_line(problem), f"name another folder in {FOLDER}")
        return
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        advice = "set TPUFLOW_CACHE to a folder if the same trainings are begun again and again"
        yield Finding(OK, "compile cache", "none: each process translates its Programs anew", advice)
    elif "://" in folder or _writable(Path(folder)):
        yield Finding(OK, "compile cache", folder)
    else:
        yield Finding(WARN, "compile cache", f"{folder} cannot be written", "name another folder in JAX_COMPILATION_CACHE_DIR")


def _shim() -> Iterator[Finding]:
    """Whether stock JAX's calls of the simulated device are launched in C."""
    from tpuflow.pjrt.shim import compiled

    try:
        yield Finding(OK, "calls by stock JAX", f"launched in C ({compiled()})")
    except OSError as problem:
        yield Finding(
            OK, "calls by stock JAX", f"launched by Python, in twice the time: {one_line(problem)}", "install a C compiler if that matters"
        )


def _data() -> Iterator[Finding]:
    """Where data sets are looked for."""
    from tpuflow.data.places import VARIABLE, cache_dir, shared_dir

    shared, cache = shared_dir(), cache_dir()
    if shared is not None and not shared.is_dir():
        yield Finding(WARN, f"${VARIABLE}", f"{shared} is no folder", "name one that holds the data sets, or unset it")
    elif shared is not None:
        yield Finding(OK, f"${VARIABLE}", str(shared))
    else:
        yield Finding(OK, f"${VARIABLE}", "not set: data sets are looked for in the user's cache alone")
    if _writable(cache):
        there = "" if cache.is_dir() else " (not made yet)"
        yield Finding(OK, "user's cache", f"{cache}{there}")
    else:
        yield Finding(WARN, "user's cache", f"{cache} cannot be written, so that nothing can be downloaded", "set XDG_CACHE_HOME")


def _cores() -> Iterator[Finding]:
    """The host's cores and memory, on which the simulated device runs."""
    from tpuflow.device.host_memory import total_bytes

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{usable} of {os.cpu_count()} cores, {total_bytes() / 2**30:.1f} GiB of memory"
    yield Finding(OK, "host", text)


def _writable(folder: Path) -> bool:
    """Whether a folder can be written to, or be made."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _optional_packages,
    _host_processor,
    _engines,
    _compile_cache,
    _shim,
    _data,
    _cores,
)
