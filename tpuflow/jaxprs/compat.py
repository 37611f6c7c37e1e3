"""The only file that uses JAX's private names for tracing and jaxprs; all others import them from here.

Private names for a backend are in `plugins.py`, for JAX's own decompositions of primitives in `expansions.py`, and names that differ
between versions of JAX in `versions.py`.
"""

from __future__ import annotations

import functools
import linecache
import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import callback, config, core, debugging, source_info_util
from jax._src.array import ArrayImpl
from jax._src.interpreters import partial_eval
from jax._src.mesh import EMPTY_ENV, empty_abstract_mesh, thread_resources
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.extend.core import JaxprEqn as Equation
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, SingleDeviceSharding, get_abstract_mesh

from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.jaxprs import versions

__all__ = [  # and the functions below
    "ClosedJaxpr",
    "Equation",
    "Jaxpr",
    "Literal",
    "Primitive",
    "Tracer",
    "Var",
    "ad",
    "batching",
    "io_callback",
    "jaxpr_as_fun",
    "mlir",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_HOST_EFFECTS = (debugging.DebugEffect, debugging.OrderedDebugEffect, callback.IOEffect, callback.OrderedIOEffect)


# --- types ------------------------------------------------------------------------------------------------------------


def is_key(aval: Any) -> bool:
    """Whether values of this type are random keys (`jax.random.key`)."""
    return not is_token(aval) and not isinstance(aval.dtype, np.dtype) and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def is_at_host(aval: Any) -> bool:
    """Whether values of this type are in the host's memory (`jax.memory.Space.Host`)."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def at_host(aval: Any) -> Any:
    """The type of the same arrays in the host's memory."""
    return core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, memory_space=jax.memory.Space.Host)


TOKEN_TYPE, Token = core.abstract_token, core.Token
"""The type of tokens, which order effects and have neither shape nor elements; and what they are outside of jaxprs."""


def is_token(aval: Any) -> bool:
    """Whether values of this type are tokens (`jax.lax.create_token`)."""
    return aval is TOKEN_TYPE


def key_words(aval: Any) -> tuple[str, tuple[int, ...]]:
    """(the name of the PRNG implementation of a key type, the shape of one key's u32 words)."""
    return aval.dtype._impl.name, aval.dtype._impl.key_shape


def as_keys(words: Any, aval: Any) -> jax.Array:
    """Random keys of a type, from their words."""
    return jax.random.wrap_key_data(jax.numpy.asarray(words), impl=aval.dtype._impl.name)


def weakened(x: jax.Array) -> jax.Array:
    """The array, weakly typed."""
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def key_data(value: Any) -> np.ndarray:
    """A constant as a NumPy array; for random keys, their words."""
    if hasattr(value, "dtype") and is_key(value):
        value = jax.random.key_data(value)
    return np.asarray(value)


# --- jaxprs -----------------------------------------------------------------------------------------------------------


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr and its constants, whether it was closed or not."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def prune(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr after dead code elimination, which also removes unused carries of loops."""
    used = [True] * len(closed.jaxpr.outvars)
    kept = [False] * len(closed.consts) + [True] * len(closed.in_avals)
    jaxpr, used_consts, _ = partial_eval.dce_jaxpr_consts(closed.jaxpr, used, instantiate=kept)
    return core.ClosedJaxpr(jaxpr, [c for c, keep in zip(closed.consts, used_consts, strict=True) if keep])


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr after state discharge: mutable arrays (`jax.new_ref`), if it makes any, become values that are passed on."""
    changes = any(isinstance(e, core.InternalMutableArrayEffect) for e in closed.effects)
    return versions.discharged(closed) if changes else closed


def axes_of(effects: Iterable[Any]) -> tuple[Any, ...]:
    """The named axes among the effects of a jaxpr or an equation: those that a `vmap`, `pmap` or `shard_map` around it has bound."""
    return tuple(e.name for e in effects if isinstance(e, core.NamedAxisEffect))


def varying_axes(aval: Any) -> tuple[str, ...]:
    """The axes of the `shard_map`s around it that values of this type may differ along."""
    return tuple(sorted(versions.varying(aval)))


def with_axes(sizes: Mapping[str, int]) -> AbstractContextManager[None]:
    """Within the block, functions are traced as on one of so many chips along named axes: collectives over these have a meaning."""
    return core.extend_axis_env_nd(list(sizes.items()))


def mesh_around() -> AbstractMesh:
    """The mesh that is set where this is called, by `jax.set_mesh` or by `with mesh`; an empty one if none is."""
    mesh = get_abstract_mesh()
    return thread_resources.env.physical_mesh.abstract_mesh if mesh.empty else mesh


def axis_name(axis_data: Any) -> Any:
    """The name that a `vmap` gives its axis; None if it has none."""
    return None if axis_data.name is core.no_axis_name else axis_data.name


def mesh_of(closed: ClosedJaxpr) -> dict[str, int]:
    """Names and sizes of the mesh axes that the `shard_map`s of a jaxpr are over; those of one device are left out.

    Raises:
      UnsupportedPrimitiveError: two of them are over different meshes.
    """
    found: dict[str, int] = {}
    for equation in equations(closed.jaxpr):
        if equation.primitive.name != "shard_map":
            continue
        mesh = {str(name): int(size) for name, size in equation.params["mesh"].shape.items() if size > 1}
        if found and mesh and mesh != found:
            raise UnsupportedPrimitiveError(
                f"{location_of(equation) or 'unknown source line'}: a shard_map over {mesh} in a program that has one over {found}; a "
                "program runs on one mesh. Name all axes in one mesh, and in each shard_map's specs those it is cut over."
            )
        found = found or mesh
    return found


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Every equation of a jaxpr, and of those that its equations call, loop over or choose from."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """The jaxprs that an equation calls, loops over or chooses from."""
    yield from core.jaxprs_in_params(equation.params)


def calls_host(jaxpr: Any) -> bool:
    """Whether there is a `jax.debug.print`, a `jax.debug.callback` or an `io_callback` in a jaxpr."""
    return any(isinstance(e, _HOST_EFFECTS) for e in jaxpr.effects)


CALLS_OF_THE_HOST: dict[Any, Callable[..., Any]] = {
    debugging.debug_print_p: debugging.debug_print_p.impl,
    debugging.debug_callback_p: debugging.debug_callback_p.impl,
    callback.io_callback_p: callback.io_callback_impl,
    callback.pure_callback_p: callback.pure_callback_impl,
}
"""Primitive of a host callback -> the function that JAX runs for it."""


def host_function(equation: Equation) -> Callable[..., Any] | None:
    """The host function of a `jax.debug.print`, `jax.debug.callback`, `io_callback` or `pure_callback`; None for other equations. It takes
    arrays, and the words of random keys."""
    function = CALLS_OF_THE_HOST.get(equation.primitive)
    return None if function is None else functools.partial(where_no_mesh_is, functools.partial(function, **equation.params))


def check_calls(jaxpr: Jaxpr) -> None:
    """Check that the host is not called inside of a `shard_map` over some axes alone of a mesh, where chips would call for the same arrays.

    Raises:
      UnsupportedPrimitiveError: it is.
    """
    for equation in equations(jaxpr):
        if equation.primitive.name == "shard_map" and _is_partial(equation.params):
            for inner in equations(equation.params["jaxpr"]):
                if host_function(inner) is not None:
                    raise partly_mapped(location_of(inner))


def _is_partial(params: Mapping[str, Any]) -> bool:
    return any(size > 1 and name not in versions.manual_axes(params) for name, size in params["mesh"].shape.items())


def partly_mapped(source: str) -> UnsupportedPrimitiveError:
    """The error of a call of the host inside of a `shard_map` over some axes alone of a mesh."""
    return UnsupportedPrimitiveError(
        f"{source or 'unknown source line'}: a call of the host inside of a jax.shard_map over some axes alone of its mesh, where chips "
        "would call for the same arrays. Leave axis_names out, so that all axes are mapped, or call outside of it."
    )


def where_no_mesh_is(function: Callable[..., Any], *arrays: Any) -> Any:
    """A host function's results. If a mesh is set here, which would be for the arrays of the program, it is called on another thread, as
    JAX's CPU backend calls it: a mesh is its thread's."""
    if mesh_around().empty:
        return function(*arrays)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arrays).result()


def waits_for_host(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, or one inside of it, calls the host for results."""
    return _waits(jaxpr, set())


def _waits(jaxpr: Jaxpr, known: set[int]) -> bool:
    """`known`: ids of jaxprs that are known not to."""
    if id(jaxpr) in known:
        return False
    for equation in jaxpr.eqns:
        if equation.primitive in CALLS_OF_THE_HOST and equation.outvars:
            return True
        if any(_waits(inner, known) for inner in inner_jaxprs(equation)):
            return True
    known.add(id(jaxpr))
    return False


def own_definition(equation: Equation) -> ClosedJaxpr | None:
    """The jaxpr of a library primitive's implementation (`def_impl`); None if it has none that JAX can trace."""
    implementation = vars(equation.primitive).get("impl")
    if implementation is None or isinstance(implementation, functools.partial):  # such as JAX's, which compiles the primitive
        return None
    avals = [v.aval for v in equation.invars]
    with jax.disable_jit(False):
        try:
            return jax.make_jaxpr(functools.partial(implementation, **equation.params))(*avals)
        except jax.errors.JAXTypeError:  # it computes with numbers, not with arrays
            return None


# --- operations one by one --------------------------------------------------------------------------------------------

HOST_PRIMITIVES = (debugging.debug_print_p, debugging.debug_callback_p)


class _OneByOne(core.Trace):
    """A trace that evaluates every operation by `run(primitive, operands, params)`. Functions with custom derivatives are called."""

    def __init__(self, run: Callable[[Primitive, Sequence[Any], dict[str, Any]], Any]):
        super().__init__()
        self._run = run

    def stage_value(self, val: Any) -> Any:
        return jax.numpy.asarray(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        with core.eval_context():  # else what runs it would come back here
            return self._run(primitive, tracers, params)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, **_: Any) -> Any:
        raise UnsupportedPrimitiveError("shard_map and pmap do not run under jax.disable_jit; leave it, or the map, out.")


def operations_go_to(run: Callable[[Primitive, Sequence[Any], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Within the block, operations that JAX functions bind are evaluated by `run` instead of by JAX, outside of all tracing."""
    return core.set_current_trace(_OneByOne(run))


def is_transforming() -> bool:
    """Whether a transformation (grad, vmap, jit, make_jaxpr) is under way where this is called."""
    return not isinstance(core.trace_ctx.trace, core.EvalTrace | _OneByOne)


_CONTEXT, _PLAIN_TRACE, _NO_AXES, _MESH_IN_USE = core.trace_ctx, core.EvalTrace, versions.NO_AXES, config.abstract_mesh_context_manager
_NOTHING_JITTED, _DEFAULT_DEVICE, _NAN_SOUGHT, _INF_SOUGHT = config.disable_jit, config.default_device, config.debug_nans, config.debug_infs
"""JAX's state, under names that are found at once: each call of a compiled function asks for all of it."""


def traced_under() -> Any:
    """JAX's settings that a trace depends on, named axes and meshes among them (`trace_context`); hashable."""
    return config.trace_context()


def changed_settings(new: Sequence[Any], old: Sequence[Any]) -> list[str]:
    """The names of what differs between two results of `traced_under`; all that may where this JAX does not tell them."""
    names = versions.setting_names()
    if len(names) != len(new):
        return ["JAX's settings, the named axes, or the mesh"]
    return sorted({_AROUND.get(name, name) for name, one, other in zip(names, new, old, strict=True) if one != other})


_AROUND = {
    "axis_env_state": "the named axes", "mesh_context_manager": "the mesh", "abstract_mesh_context_manager": "the mesh",
}  # fmt: skip
"""JAX's names of settings that are no options of a user's."""


def is_alone_under(settings: Any) -> bool:
    """Whether a call made here `is_alone`, and under these settings, under which one was: two questions in the time of the first."""
    return type(_CONTEXT.trace) is _PLAIN_TRACE and config.trace_context() == settings


def is_alone() -> bool:
    """Whether a call made here depends on nothing but its arguments and JAX's settings: no transformation is active, no named axis is
    bound, no mesh is set, and `jax.disable_jit` is off. It compares with JAX's singletons for that state, and is False for anything
    else."""
    return (
        type(_CONTEXT.trace) is _PLAIN_TRACE
        and _CONTEXT.axis_env is _NO_AXES
        and ((mesh := _MESH_IN_USE.value) is None or mesh is empty_abstract_mesh)
        and thread_resources.env is EMPTY_ENV
        and not _NOTHING_JITTED.value
    )


def jits_nothing() -> bool:
    """Whether `jax.disable_jit` is on: `jax.config.jax_disable_jit`, in half the time."""
    return _NOTHING_JITTED.value


def avals_on_one_device(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """Of arrays that are all on one device, as part of a cache key: the device, whether one is committed to it, so that results are, and
    their types; None if a leaf is anything else."""
    device, committed, avals = None, False, []
    for leaf in leaves:
        if type(leaf) is not ArrayImpl or type(sharding := leaf._sharding) is not SingleDeviceSharding:
            return None
        if sharding._device is not device:
            if device is not None:
                return None
            device = sharding._device
        committed = committed or leaf._committed
        avals.append(leaf.aval)
    return device, committed, *avals


def computes_plainly() -> bool:
    """Whether JAX's settings ask nothing of an executable that is launched without its dispatch: to run on another device than where its
    arguments are, or to look for NaN and infinities in its results."""
    return _DEFAULT_DEVICE.value is None and not _NAN_SOUGHT.value and not _INF_SOUGHT.value


# --- where the user wrote it ------------------------------------------------------------------------------------------


source_info_util.register_exclusion(_PACKAGE)


@contextmanager
def in_place_of(equation: Equation) -> Iterator[None]:
    """Within the block, traced operations get the equation's source line, its name scopes (inside of the current ones) and its settings.

    An equation without a line (in a function that JAX traced once for all its calls) leaves the line of the enclosing call in place.
    """
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    traceback = equation.source_info.traceback
    line = traceback if _user_frame(traceback) else None
    with source_info_util.user_context(line, name_stack=stack), equation.ctx.manager:
        yield


@functools.lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    return any(part in filename for part in _LIBRARIES)


@functools.lru_cache(maxsize=4096)
def _user_frame(traceback: Any) -> Any:
    """The innermost frame outside installed libraries, else one of a library that is neither JAX nor ours, else None."""
    frames = list(source_info_util.user_frames(traceback))
    return next((f for f in frames if not is_library(f.file_name)), frames[0] if frames else None)


def source_of(equation: Equation) -> str:
    """The user's line as "file.py:12 (function)"; empty if unknown."""
    frame = _user_frame(equation.source_info.traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})" if frame else ""


def location_of(equation: Equation) -> str:
    """The user's line with the file's whole path, for error messages; empty if unknown."""
    frame = _user_frame(equation.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})" if frame else ""


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the user's program, with what is written there (empty if it cannot be read)."""

    file: str
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.function} at {self.file}:{self.number}{f': `{self.code}`' if self.code else ''}"


def user_line(error: BaseException) -> UserLine | None:
    """The innermost line outside of libraries that an error came through on its way to where it was caught."""
    lines = [line for line in _lines(error) if line is not None]
    return lines[-1] if lines else None


def user_lines(error: BaseException) -> tuple[UserLine, ...]:
    """The lines of the user's program that an error came through, outermost first; none if it came out of our own code in the end."""
    if isinstance(error, SyntaxError) and error.filename:
        return (UserLine(error.filename, error.lineno or 0, "<module>", (error.text or "").strip()),)
    lines = list(_lines(error))
    return tuple(line for line in lines if line is not None) if lines and lines[-1] is not None else ()


def _lines(error: BaseException) -> Iterator[UserLine | None]:
    """A line for each frame of an error's traceback that is the user's, None for each of ours, nothing for those of libraries."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            yield None
        elif source_info_util.is_user_filename(code.co_filename) and not is_library(code.co_filename):
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            yield UserLine(code.co_filename, trace.tb_lineno, code.co_qualname, text)
        trace = trace.tb_next


def scope_of(equation: Equation) -> str:
    """The stack of name scopes: Flax module path, and jvp/transpose marks."""
    return str(equation.source_info.name_stack)
