"""A jaxpr on its way to the device: traced, compiled, run. The words are those of jax.stages."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.checking import check_choice
from tpuflow.chips import Chip
from tpuflow.compiler import compile_jaxpr
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import Calibration, ProgramTime
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.program import Program
from tpuflow.jaxprs.compat import ClosedJaxpr, Token, as_keys, is_at_host, is_key, is_token, jaxpr_as_fun, weakened
from tpuflow.reports.profile import Profile
from tpuflow.reports.profile import profile as make_profile
from tpuflow.reports.reported import Reported
from tpuflow.stages.analysis import MemoryAnalysis, cost_analysis, memory_analysis
from tpuflow.stages.complex_ports import each_plane, is_complex, joined, plane_names, split, with_planes
from tpuflow.stages.jax_options import check_jax_options

CACHED = 512
_SCALARS = {bool: np.dtype(np.bool_), int: np.dtype(np.int32), float: np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class Target:
    """Where Programs run."""

    chip: Chip
    engine: str = "fast"
    fidelity: str = "native"


class DeviceFunction:
    """A jaxpr compiled for the device: flat arrays in, flat arrays out.

    `donated` says of each input whether the device may overwrite it. What the Program has in the host's memory is there as JAX's array too.
    """

    __slots__ = ("_finish", "_from", "_host_inputs", "_planes", "_to", "executable", "jaxpr")

    def __init__(self, jaxpr: ClosedJaxpr, name: str, target: Target, donated: Sequence[bool] = (), input_names: Sequence[str] = ()):
        self.jaxpr = jaxpr
        program = compile_planes(jaxpr, name, target.chip, donated, input_names)
        self.executable = Executable(program, engine=target.engine, fidelity=target.fidelity)
        self._to = tuple((i, a) for i, a in enumerate(jaxpr.in_avals) if is_key(a))
        self._from = tuple((i, f) for i, f in enumerate(map(_finisher, jaxpr.out_avals)) if f is not None)
        self._finish = target.engine == "reference"
        self._planes = any(map(is_complex, (*jaxpr.in_avals, *jaxpr.out_avals)))
        self._host_inputs = tuple(i for i, a in enumerate(jaxpr.in_avals) if is_at_host(a))

    def of_exact(self, arrays: list[Any]) -> Callable[[list[Any]], list[Any]]:
        """The function for arrays of JAX's that have exactly the types of these, with which it has been called, and are on their device."""
        converts = self._to or self._from or self._finish or self._planes or self._host_inputs
        return self if converts else self.executable.launcher(arrays)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run on arrays of exactly the compiled shapes and types.

        Raises:
          LaunchError: a shape or type differs.
        """
        if self._to or self._host_inputs:
            arrays = list(arrays)
            for i in self._host_inputs:
                arrays[i] = _in_memory(arrays[i], jax.memory.Space.Device)
            for i, _ in self._to:
                arrays[i] = _in_memory(jax.random.key_data(arrays[i]), jax.memory.Space.Device)
        if self._planes:
            arrays = split(arrays, self.jaxpr.in_avals)
        outputs, _ = self.executable.launch(arrays)
        if self._finish:
            outputs = [jnp.asarray(x) for x in outputs]
        if self._planes:
            outputs = joined(outputs, self.jaxpr.out_avals)
        for i, finish in self._from:
            outputs[i] = finish(outputs[i])
        return outputs


def compile_planes(jaxpr: ClosedJaxpr, name: str, chip: Chip, donated: Sequence[bool], input_names: Sequence[str]) -> Program:
    """The Program of a jaxpr, complex arguments and results as their planes."""
    avals = jaxpr.in_avals
    if any(map(is_complex, (*avals, *jaxpr.out_avals))):
        donated = each_plane(donated, avals) if donated else ()
        input_names = plane_names(input_names, avals) if input_names else ()
        jaxpr = with_planes(jaxpr)
    return compile_jaxpr(jaxpr, name=name, chip=chip, donated=donated, input_names=input_names)


def as_array(value: Any) -> Any:
    """An argument leaf as the device takes it: JAX and NumPy arrays as they are, Python scalars and 64-bit arrays narrowed as JAX does,
    an array of nothing for a token."""
    dtype = _SCALARS.get(type(value))
    if dtype is not None:
        return np.array(value, dtype)
    if isinstance(value, np.ndarray) and value.dtype.itemsize < 8:
        return value
    if isinstance(value, Token):
        return np.zeros(0, np.bool_)
    return value if isinstance(value, jax.Array) else np.asarray(jnp.asarray(value))


def run_jaxpr(jaxpr: ClosedJaxpr, name: str, target: Target, arguments: Sequence[Any]) -> list[Any]:
    """Run a jaxpr on the device; it is compiled once."""
    return _function(jaxpr, name, target)([as_array(a) for a in arguments])


@functools.lru_cache(CACHED)
def _function(jaxpr: ClosedJaxpr, name: str, target: Target) -> DeviceFunction:
    return DeviceFunction(jaxpr, name, target)


class Compiled(Reported):
    """A function compiled for given shapes; what `tpuflow.jit(f).lower(...).compile()` gives."""

    def __init__(self, function: DeviceFunction, in_tree: Any, out_tree: Any):
        self._function, self._in_tree, self._out_tree = function, in_tree, out_tree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call with arguments of the compiled structure, shapes and types, without the static ones.

        Raises:
          TypeError: the structure differs.
          LaunchError: a shape or type differs.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._in_tree:
            raise TypeError(
                f"compiled for arguments of structure {self._in_tree}, called with {tree}; call it as it was lowered, or lower it anew."
            )
        return jax.tree.unflatten(self._out_tree, self._function([as_array(leaf) for leaf in leaves]))

    @property
    def executable(self) -> Executable:
        """The Program, loaded on the device."""
        return self._function.executable

    @property
    def in_tree(self) -> Any:
        """Structure of (args, kwargs)."""
        return self._in_tree

    @property
    def out_tree(self) -> Any:
        """Structure of the result."""
        return self._out_tree

    @property
    def args_info(self) -> Any:
        """Shapes and types of (args, kwargs), without the static ones."""
        return _info(self._in_tree, self._function.jaxpr.in_avals)

    @property
    def out_info(self) -> Any:
        """Shapes and types of the result."""
        return _info(self._out_tree, self._function.jaxpr.out_avals)

    def runtime_executable(self) -> Executable:
        """The Program, loaded on the device."""
        return self.executable

    def as_text(self) -> str:
        """The Program in assembly language; the assembler reads it back."""
        return disassemble(self.executable.program)

    def cost_analysis(self, calibration: Calibration | None = None) -> dict[str, float]:
        """Work ("flops", "matrix flops", "bytes accessed", "kernels") and time ("optimal_seconds", "device_seconds", "modelled_seconds").

        See `tpuflow.stages.analysis.cost_analysis`.
        """
        return cost_analysis(self.executable.program, self.time(calibration))

    def memory_analysis(self) -> MemoryAnalysis:
        """HBM bytes of arguments, results, what they share, constants, temporaries and code, and the peak."""
        return memory_analysis(self.executable.program)

    def time(self, calibration: Calibration | None = None) -> ProgramTime:
        """The modelled time of a call, kernel by kernel, with a calibration of one's own or what tpuflow has for the chip."""
        return self.executable.time(calibration=calibration)

    def profile(self, calibration: Calibration | None = None) -> Profile:
        """The modelled cost of a call, by layer, kernel and queue, and the memory's timeline; `calibration` is as of `time`."""
        return make_profile(self.executable.program, self.time(calibration))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained .tpx file."""
        self.executable.save(path)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A traced function, ready to be compiled; what `tpuflow.jit(f).lower(...)` gives."""

    jaxpr: ClosedJaxpr
    in_tree: Any
    out_tree: Any
    fun_name: str
    make: Callable[[], DeviceFunction]

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Put it on the chip.

        Raises:
          ConfigError: there are compiler options, which are XLA's.
        """
        check_jax_options(compiler_options)
        return Compiled(self.make(), self.in_tree, self.out_tree)

    def lower(self) -> Lowered:
        """Itself: what `tpuflow.jit(f).trace(...)` gives is lowered."""
        return self

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The jaxpr as text; or, in the dialect "stablehlo", what JAX lowers it to for TPUs, with locations if `debug_info`.

        Raises:
          ConfigError: another dialect.
        """
        check_choice("dialect", dialect or "jaxpr", ("jaxpr", "stablehlo"))
        if dialect != "stablehlo":
            return str(self.jaxpr)
        traced = jax.jit(jaxpr_as_fun(self.jaxpr), keep_unused=True).trace(*_specs(self.jaxpr.in_avals))
        return traced.lower(lowering_platforms=("tpu",)).as_text(debug_info=debug_info)

    def cost_analysis(self) -> dict[str, float]:
        """That of the compiled Program; see `Compiled.cost_analysis`."""
        return self.compile().cost_analysis()

    @property
    def args_info(self) -> Any:
        """Shapes and types of (args, kwargs), without the static ones."""
        return _info(self.in_tree, self.jaxpr.in_avals)

    @property
    def out_info(self) -> Any:
        """Shapes and types of the result."""
        return _info(self.out_tree, self.jaxpr.out_avals)


def _info(tree: Any, avals: Sequence[Any]) -> Any:
    return jax.tree.unflatten(tree, _specs(avals))


def _specs(avals: Sequence[Any]) -> list[Any]:
    """Shapes and types; of tokens the type, which has neither."""
    return [a if is_token(a) else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _finisher(aval: Any) -> Callable[[Any], Any] | None:
    """What must be done to an output so that it has the JAX type `aval`."""
    if is_token(aval):
        return Token
    if is_key(aval):
        return functools.partial(as_keys, aval=aval)
    if is_at_host(aval):
        return functools.partial(_in_memory, space=jax.memory.Space.Host)
    if getattr(aval, "weak_type", False):
        return weakened
    return None


def _in_memory(array: Any, space: Any) -> Any:
    """An array in a `jax.memory.Space`, if it is one of JAX's, which are in one."""
    is_there = not isinstance(array, jax.Array) or is_at_host(array.aval) == (space is jax.memory.Space.Host)
    return array if is_there else jax.device_put(array, space)
