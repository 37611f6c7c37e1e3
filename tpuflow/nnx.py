"""`tpuflow.nnx.jit`: a function of nnx objects, compiled for the simulated device, that updates them in place as `flax.nnx.jit` does.

It uses flax's graph protocol (`nnx.update_context`): arguments are split into graph definitions, which are static, and arrays, which go to
the device; the results are merged into the caller's objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from tpuflow import amp
from tpuflow.chips import Chip
from tpuflow.errors import ConfigError
from tpuflow.isa.program import Program
from tpuflow.jaxprs.compat import Tracer
from tpuflow.stages.compiling import jit as jit_arrays
from tpuflow.stages.nnx_objects import is_object
from tpuflow.stages.staging import Lowered

_CONTEXT = "tpuflow.nnx.jit"


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    chip: str | Chip = "generic",
    policy: str | amp.Policy | None = None,
    engine: str = "fast",
    fidelity: str = "native",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
) -> Any:
    """`fun` compiled for the simulated device, as `flax.nnx.jit` compiles for real ones.

    Arguments and results are trees of arrays and of nnx objects: modules, variables, `nnx.Optimizer`, metrics, `nnx.Rngs`. One object may
    be part of several arguments. What `fun` changes in its arguments (values, static attributes, structure) has changed in the
    caller's objects when the call returns. It is traced once for each combination of graph definitions, shapes, types and static values.
    The options are those of `tpuflow.jit`; arrays of donated nnx objects are replaced by the results.

    Raises:
      ConfigError: an option is unknown or does not fit the function's signature; `fun` is a method of a module that already exists, whose
        changes could not come back.
    """
    options = {name: value for name, value in locals().items() if name != "fun"}
    if fun is None:
        return functools.partial(jit, **options)
    owner = getattr(fun, "__self__", None)
    if inspect.ismethod(fun) and is_object(owner):
        raise ConfigError(
            f"tpuflow.nnx.jit: {fun.__qualname__} is bound to a {type(owner).__name__}, whose changes could not come back; decorate the "
            f"method in its class, or call tpuflow.nnx.jit({fun.__qualname__}) with the object as first argument."
        )
    return ObjectJitFunction(fun, options)


class ObjectJitFunction:
    """A function of nnx objects that runs on the simulated device; made by `tpuflow.nnx.jit`."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]):
        functools.update_wrapper(self, fun)
        self._jitted = jit_arrays(self._of_arrays(fun), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on the device, and update the arguments' nnx objects.

        Raises:
          ValueError: under a transformation (`jax.grad` of a function that calls this one), an nnx object comes from outside of it, and
            so cannot be updated from within; make it an argument there and use flax's transformation (`nnx.grad`).
        """
        with nnx.update_context(_CONTEXT):
            args, kwargs = _split((args, kwargs), checked=any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))))
            results = _filled(self._jitted(*args, **kwargs), (args, kwargs))
            *_, outputs = _merged(results, is_inner=False)
        return outputs

    def trace(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `lower`."""
        return self.lower(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace for the given arguments, which stay as they are. What it compiles to has figures, reports and a file to save."""
        return self._with_split(self._jitted.lower, args, kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The Program for the given arguments, not loaded on a device."""
        return self._with_split(self._jitted.program, args, kwargs)

    def arrays(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The arguments as the flat list that the Program takes."""
        return self._with_split(self._jitted.arrays, args, kwargs)

    def clear_cache(self) -> None:
        """Forget everything traced and compiled."""
        self._jitted.clear_cache()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method of a class is bound as functions are."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return repr(self._jitted).replace("tpuflow.jit", _CONTEXT, 1)

    def _of_arrays(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` as a function of split arguments, which returns (the arguments' objects after the call, split; the results, split)."""

        @functools.wraps(fun)
        def of_arrays(*args: Any, **kwargs: Any) -> Any:
            given = list(self._kept(args, kwargs))  # held as long as its elements are told by their identity
            kept = {id(leaf): number for number, leaf in given}
            args, kwargs = _merged((args, kwargs), is_inner=True)
            outputs = fun(*args, **kwargs)
            *objects, outputs = _split((*_objects_only((args, kwargs)), outputs))
            return *jax.tree.map(lambda x: _Unchanged(kept[id(x)]) if id(x) in kept else x, objects), outputs

        return of_arrays

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """(number of the leaf, array) of the arguments' arrays that the caller keeps: those of arguments that are neither static nor
        donated."""
        for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path((args, kwargs))):
            place = path[1].idx if isinstance(path[1], jax.tree_util.SequenceKey) else path[1].key
            if isinstance(leaf, Tracer) and not self._jitted.donates(place, len(args)):
                yield number, leaf

    def _with_split(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with nnx.update_context(_CONTEXT):
            args, kwargs = _split((args, kwargs))
            return call(*args, **kwargs)


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class _Unchanged:
    """Stands for an array that the function has left unchanged: the number of the argument's leaf. It is not copied to a result."""

    leaf: int


def _filled(results: Any, arguments: Any) -> Any:
    """Results with the arguments' own arrays in place of `_Unchanged`."""
    leaves = jax.tree.leaves(arguments)
    return jax.tree.map(lambda x: leaves[x.leaf] if _is_unchanged(x) else x, results, is_leaf=_is_unchanged)


def _is_unchanged(value: Any) -> bool:
    return isinstance(value, _Unchanged)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("params", "batch_stats", "others"), meta_fields=("graphdef",))
@dataclass(frozen=True, slots=True)
class _Parts:
    """An nnx object, split. The fields have the names of linen's collections, by which memory reports recognise parameters."""

    graphdef: Any
    params: Any
    batch_stats: Any
    others: Any


def _split(tree: Any, *, checked: bool = False) -> Any:
    """The tree with `_Parts` in place of every nnx object; an object that occurs twice is split once.

    `checked`: refuse objects that cannot be updated from here, before anything is split; without it, flax reports them too late.
    """

    def split(context: nnx.SplitContext, path: Any, prefix: Any, value: Any) -> _Parts:
        return _Parts(*context.split(value, nnx.Param, nnx.BatchStat, ...))

    return nnx.to_tree(tree, prefix=0 if checked else None, split_fn=split, ctxtag=_CONTEXT)  # flax checks where there is a prefix


def _merged(tree: Any, *, is_inner: bool) -> Any:
    """The tree with its nnx objects again: inside of the function (`is_inner`) new ones, outside the caller's, updated."""

    def merge(context: nnx.MergeContext, path: Any, prefix: Any, parts: _Parts) -> Any:
        return context.merge(parts.graphdef, parts.params, parts.batch_stats, parts.others)

    return nnx.from_tree(tree, merge_fn=merge, is_node_leaf=_is_parts, is_leaf=_is_parts, ctxtag=_CONTEXT, is_inner=is_inner)


def _is_parts(value: Any) -> bool:
    return isinstance(value, _Parts)


def _objects_only(tree: Any) -> Any:
    """The tree with None in place of arrays, which a function cannot change for its caller."""
    return jax.tree.map(lambda leaf: leaf if is_object(leaf) else None, tree, is_leaf=is_object)
