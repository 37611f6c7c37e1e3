"""`tpuflow.jit`: a function of arrays, compiled for the simulated device and called like any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import default_registry

from tpuflow import amp
from tpuflow.checking import check_choice, check_switch
from tpuflow.chips import Chip, get_chip
from tpuflow.device.runtime import ENGINES, FIDELITIES
from tpuflow.errors import ConfigError, a_thing
from tpuflow.garbage import undisturbed
from tpuflow.isa.program import Program
from tpuflow.jaxprs.compat import (
    ClosedJaxpr,
    Token,
    Tracer,
    avals_on_one_device,
    axes_of,
    is_alone,
    is_alone_under,
    is_transforming,
    traced_under,
)
from tpuflow.jaxprs.shardings import cuts, is_mapped, with_sharding, with_shardings
from tpuflow.stages.argument_sets import ArgumentSet, argument_set, parameters_of
from tpuflow.stages.cache_misses import explain
from tpuflow.stages.complex_ports import split
from tpuflow.stages.device_call import device_call
from tpuflow.stages.eager import one_by_one, runs_one_by_one
from tpuflow.stages.jax_options import check_jax_options
from tpuflow.stages.shardings import Shardings
from tpuflow.stages.signatures import signature, spec_of
from tpuflow.stages.staging import DeviceFunction, Lowered, Target, as_array, compile_planes
from tpuflow.stages.tracing import users_code

BACKEND = "tpusim"

_NO_SHARDINGS = Shardings()
_Exact = dict[Any, tuple[Callable[[list[Any]], list[Any]], Any]]
"""What is compiled for arrays of exactly these types, all on one device: nothing is left to check or convert."""
_flatten = default_registry.flatten  # jax.tree.flatten without its layers of Python


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    backend: str = BACKEND,
    chip: str | Chip = "generic",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    policy: str | amp.Policy | None = None,
    engine: str = "fast",
    fidelity: str = "native",
) -> Any:
    """`fun` compiled for the simulated device, as `jax.jit` compiles for real ones.

    Arguments and results are trees of arrays, Python scalars (weakly typed) and random keys. The function is traced once for each
    combination of tree structure, shapes, types and static values. Under `grad`, `vmap` and the like the call stays on the device;
    under plain `jax.jit` the host calls the device; under another `tpuflow.jit` it becomes part of that program. Under `jax.disable_jit`
    its operations run on the device one by one, and Python sees their values.

    Args:
      backend: "tpusim", the only one.
      chip: a row of the catalogue, or a Chip.
      static_argnums, static_argnames: arguments that are compile-time constants; they must be hashable.
      donate_argnums, donate_argnames: arguments whose memory the device may reuse; do not use them after the call.
      keep_unused, inline: as it always is: a Program takes every argument, and calls are inlined.
      compiler_options: none; those of XLA have no meaning here.
      in_shardings, out_shardings: how arguments and results lie on the chips of a mesh, as jax.jit takes them; None: as an argument brings
        it along, or as the partitioner finds best. The program is then partitioned over the mesh (docs/meshes.md).
      policy: precision, applied with `tpuflow.autocast`.
      engine, fidelity: how the device is simulated.

    Raises:
      ConfigError: an option is unknown or does not fit the function's signature.
    """
    if fun is None:
        options = {k: v for k, v in locals().items() if k != "fun"}
        return functools.partial(jit, **options)
    if not isinstance(backend, str) or backend != BACKEND:
        raise ConfigError(f"unknown backend {backend!r}; tpuflow.jit has {BACKEND!r} only. For other backends use jax.jit.")
    if not callable(fun):
        raise ConfigError(
            f"tpuflow.jit: expected a function, got {a_thing(fun)}; give the function itself, not its result: tpuflow.jit(f)(x)."
        )
    check_jax_options(compiler_options)
    shardings = Shardings(in_shardings, out_shardings)
    check_switch("tpuflow.jit: keep_unused", keep_unused)
    check_switch("tpuflow.jit: inline", inline)
    check_choice("engine", engine, ENGINES)
    check_choice("fidelity", fidelity, FIDELITIES)
    static = argument_set(fun, "static", static_argnums, static_argnames)
    donated = argument_set(fun, "donate", donate_argnums, donate_argnames)
    if both := static.names & donated.names or static.numbers & donated.numbers:
        raise ConfigError(f"tpuflow.jit: arguments {sorted(map(str, both))} cannot be both static and donated.")
    return JitFunction(fun, static, donated, Target(get_chip(chip), engine, fidelity), policy, shardings)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A function traced for one signature."""

    jaxpr: ClosedJaxpr
    out_tree: Any
    donated: tuple[bool, ...]
    names: tuple[str, ...]

    @property
    def captures_tracers(self) -> bool:
        """Whether it uses values of an enclosing transformation, which another call will not have."""
        return any(isinstance(c, Tracer) for c in self.jaxpr.consts)

    @property
    def uses_axes(self) -> bool:
        """Whether it uses a named axis of an enclosing transformation."""
        return bool(axes_of(self.jaxpr.effects))


class JitFunction:
    """A function that runs on the simulated device; made by `tpuflow.jit`."""

    def __init__(
        self, fun: Callable[..., Any], static: ArgumentSet, donated: ArgumentSet, target: Target, policy: Any,
        shardings: Shardings = _NO_SHARDINGS,
    ):  # fmt: skip
        functools.update_wrapper(self, fun)
        self._fun = fun if policy is None else amp.autocast(fun, policy)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._static, self._donated, self._target, self._shardings = static, donated, target, shardings
        self._has_static = bool(static)
        self._traced: dict[Any, _Traced] = {}
        self._compiled: dict[Any, tuple[DeviceFunction, Any]] = {}
        self._exact: dict[Any, _Exact] = {}
        """What is compiled for calls that are alone under these settings of JAX's."""
        self._last: tuple[Any, _Exact] = (None, {})
        """The settings of the last such call, and what is compiled for them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on the device."""
        settings, alike = self._last
        if not is_alone_under(settings):
            settings, alike = self._under_others()
            if alike is None and runs_one_by_one():
                return self._one_by_one(args, kwargs)
        statics = ()
        if self._has_static:
            args, kwargs, statics = self._split(args, kwargs)
        leaves, tree = _flatten((args, kwargs))
        exact = (tree, statics, avals_on_one_device(leaves)) if alike is not None else None
        found = None if alike is None else alike.get(exact)
        if found is None:
            return self._call((tree, statics, tuple([signature(leaf) for leaf in leaves]), settings), leaves, exact, alike)
        function, out_tree = found
        return out_tree.unflatten(function(leaves))

    def _under_others(self) -> tuple[Any, _Exact | None]:
        """JAX's settings, which are not those of the last call, and what is compiled for calls that are alone under them; None if this one
        is not."""
        settings = traced_under()
        if not is_alone():
            return settings, None
        self._last = found = settings, self._exact.setdefault(settings, {})
        return found

    def trace(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `lower`: here tracing is all there is before compiling, so that the two stages of jax.stages are one."""
        return self.lower(*args, **kwargs)

    @undisturbed()
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace for the given arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        key, _ = self._key(args, kwargs)
        traced = self._trace(key)
        return Lowered(traced.jaxpr, key[0], traced.out_tree, self._name, lambda: self._compile(key)[0])

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The Program for the given arguments (arrays or `jax.ShapeDtypeStruct`s), not loaded on a device."""
        traced = self._trace(self._key(args, kwargs)[0])
        return compile_planes(traced.jaxpr, self._name, self._target.chip, traced.donated, traced.names)

    def donates(self, place: int | str, count: int) -> bool:
        """Whether an argument is given away: by its position in a call with so many positional arguments, or by its name."""
        numbers = {n % count if -count <= n < 0 else n for n in self._donated.numbers}
        return place in (self._donated.names if isinstance(place, str) else numbers)

    def arrays(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The arguments, static ones aside, as the flat list that the Program takes."""
        key, leaves = self._key(args, kwargs)
        return split(leaves, self._trace(key).jaxpr.in_avals)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the result."""
        return self.lower(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget everything traced and compiled."""
        self._traced.clear()
        self._compiled.clear()
        self._exact.clear()
        self._last = (None, {})

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method of a class is bound as functions are."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<tpuflow.jit of {self._name} for chip {self._target.chip.name}>"

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        args, kwargs, statics = self._split(args, kwargs) if self._static else (args, kwargs, ())
        leaves, tree = jax.tree.flatten((args, kwargs))
        return (tree, statics, tuple(signature(leaf) for leaf in leaves), traced_under()), leaves

    def _one_by_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under `jax.disable_jit`: the function itself, each of its operations on the device."""
        args, kwargs, statics = self._split(args, kwargs) if self._static else (args, kwargs, ())
        args, kwargs = jax.tree.map(lambda x: x if isinstance(x, Token) else jnp.asarray(x), (args, kwargs))
        return one_by_one(lambda: self._fun(*_with_static(args, statics), **kwargs, **_static_names(statics)), self._target)

    def _call(self, key: Any, leaves: list[Any], exact: Any, alike: _Exact | None) -> Any:
        """A call with leaves of any kind; if it is alone, with arrays of `exact` types, the next that is `alike` need not come here."""
        found = self._compiled.get(key)
        if found is None or _is_staged(leaves):
            return self._slow_call(key, leaves)
        function, out_tree = found
        outputs = function([as_array(leaf) for leaf in leaves])
        if alike is not None and exact[-1] is not None:
            alike[exact] = (function.of_exact(leaves), out_tree)
        return out_tree.unflatten(outputs)

    @undisturbed()
    def _slow_call(self, key: Any, leaves: list[Any]) -> Any:
        """The first call of a signature, or a call under a transformation."""
        traced = self._trace(key)
        if traced.captures_tracers or traced.uses_axes or _is_staged(leaves):
            return traced.out_tree.unflatten(device_call(leaves, traced.jaxpr, self._name, self._target))
        function, out_tree = self._compile(key)
        return out_tree.unflatten(function([as_array(leaf) for leaf in leaves]))

    def _compile(self, key: Any) -> tuple[DeviceFunction, Any]:
        if key not in self._compiled:
            traced = self._trace(key)
            function = DeviceFunction(traced.jaxpr, self._name, self._target, traced.donated, traced.names)
            self._compiled[key] = (function, traced.out_tree)
        return self._compiled[key]

    def _trace(self, key: Any) -> _Traced:
        if key in self._traced:
            return self._traced[key]
        explain(self._name, key, self._traced, self._leaf_names)
        tree, statics, signatures, _ = key
        out_trees: list[Any] = []

        @functools.wraps(self._fun)  # so that JAX's messages name the user's function, and its line
        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            outputs, out_tree = jax.tree.flatten(self._fun(*_with_static(args, statics), **kwargs, **_static_names(statics)))
            out_trees.append(out_tree)
            there = self._shardings.results_at_host(out_tree)
            return [jax.device_put(x, jax.memory.Space.Host) if to_host else x for x, to_host in zip(outputs, there, strict=True)]

        names = self._leaf_names(tree, statics)
        there = self._shardings.arguments_at_host(tree, [is_there for *_, is_there, _ in signatures])
        specs = [spec_of((*kind, is_there, None)) for (*kind, _, _), is_there in zip(signatures, there, strict=True)]
        shardings = self._shardings.of_arguments(tree, names, specs, [brought for *_, brought in signatures])
        specs = [with_sharding(spec, sharding) for spec, sharding in zip(specs, shardings, strict=True)]
        with users_code(f"while tracing {self._name} for tpuflow.jit"), jax.disable_jit(False):
            jaxpr = jax.make_jaxpr(flat)(*specs)
            jaxpr = self._sharded(jaxpr, shardings, out_trees[0])
        traced = _Traced(jaxpr, out_trees[0], self._donated_leaves(tree, statics), names)
        if not traced.captures_tracers:
            self._traced[key] = traced
        return traced

    def _sharded(self, jaxpr: ClosedJaxpr, inputs: Sequence[Any], out_tree: Any) -> ClosedJaxpr:
        """The jaxpr with the shardings of arguments and results in it; a function mapped by hand says itself how it takes arrays."""
        outputs = self._shardings.of_results(out_tree, jaxpr.out_avals)
        if not any(map(cuts, (*inputs, *outputs))) or (not self._shardings and is_mapped(jaxpr)):
            return jaxpr
        return with_shardings(jaxpr, self._name, inputs, outputs)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Arguments without the static ones, and those as a hashable tuple of (place, value, type)."""
        numbers = {n % len(args) if -len(args) <= n < 0 else n for n in self._static.numbers}
        statics = [(i, a) for i, a in enumerate(args) if i in numbers]
        statics += sorted((n, a) for n, a in kwargs.items() if n in self._static.names)
        for place, value in statics:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self._name}: static argument {place!r} must be hashable, got {type(value).__name__} {value!r}."
                ) from None
        rest = tuple(a for i, a in enumerate(args) if i not in numbers)
        return rest, {n: a for n, a in kwargs.items() if n not in self._static.names}, tuple((p, v, type(v)) for p, v in statics)

    def _positions(self, count: int, statics: tuple[Any, ...]) -> list[int]:
        """The position in the call of each argument that is not static."""
        taken = {place for place, _, _ in statics if isinstance(place, int)}
        return [i for i in range(count + len(taken)) if i not in taken]

    def _donated_leaves(self, tree: Any, statics: tuple[Any, ...]) -> tuple[bool, ...]:
        args_tree, kwargs_tree = tree.children()
        flags: list[bool] = []
        children = args_tree.children()
        total = len(children) + sum(isinstance(place, int) for place, _, _ in statics)
        numbers = {n % total if -total <= n < 0 else n for n in self._donated.numbers}
        for position, child in zip(self._positions(len(children), statics), children, strict=True):
            flags += [position in numbers] * child.num_leaves
        names = kwargs_tree.node_data()[1] if kwargs_tree.node_data() else []
        for name, child in zip(names, kwargs_tree.children(), strict=True):
            flags += [name in self._donated.names] * child.num_leaves
        return tuple(flags)

    def _leaf_names(self, tree: Any, statics: tuple[Any, ...]) -> tuple[str, ...]:
        """ "state/params/kernel": the parameter's name and the place in its tree."""
        dummy = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
        parameters = parameters_of(self._fun)
        positions = self._positions(len(dummy[0]), statics)
        names = []
        for path, _ in jax.tree_util.tree_leaves_with_path(dummy):
            in_kwargs, first, *rest = (_key_of(p) for p in path)
            place = first if in_kwargs else positions[int(first)]
            head = place if in_kwargs or place >= len(parameters) else parameters[place]
            names.append("/".join(map(str, (head, *rest))))
        return tuple(names)


def _is_staged(leaves: list[Any]) -> bool:
    """Whether a transformation is under way, whose arguments may be no tracers: the call is part of what it makes."""
    return is_transforming() or any(issubclass(kind, Tracer) for kind in set(map(type, leaves)))


def _with_static(args: tuple[Any, ...], statics: tuple[Any, ...]) -> list[Any]:
    merged = list(args)
    for place, value, _ in statics:
        if isinstance(place, int):
            merged.insert(place, value)
    return merged


def _static_names(statics: tuple[Any, ...]) -> dict[str, Any]:
    return {place: value for place, value, _ in statics if isinstance(place, str)}


def _key_of(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)
