"""Flax modules, linen and nnx, behind one face: variables as two trees (trained, carried) and a pure function of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen, nnx

from tpuflow.errors import ConfigError

MODE_ARGUMENTS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
RNG_STREAM = "dropout"
STATISTICS = "batch_stats"
"""Linen's collection of running statistics of batches: a module that owns variables of it normalises by the batch."""
MISFITS = (TypeError, ValueError, flax.errors.FlaxError)
"""What a module raises for inputs of a shape or type that it cannot take."""

Apply = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
AroundNorm = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Model:
    """A module as functions.

    `init(key, inputs)` gives (params, carried). `train_apply` and `eval_apply` take (params, carried, inputs, key) and give
    (outputs, carried). `needs_key` says whether training draws random numbers from that key. `norms(params, carried)` tells the
    parameters of batch-normalisation layers: a tree of booleans as `params`. Those layers are the modules that own running
    statistics (linen: variables of the collection "batch_stats"; nnx: `BatchStat`), whatever they are called.
    """

    name: str
    init: Callable[[jax.Array, Any], tuple[Any, Any]]
    train_apply: Apply
    eval_apply: Apply
    needs_key: Callable[[Any, Any, Any], bool]
    norms: Callable[[Any, Any], Any]


def get_model(model: Any, around_norm: AroundNorm | None = None) -> Model:
    """The functions of a linen or nnx module; `around_norm` is put around every call of a batch-normalisation layer.

    Raises:
      ConfigError: it is neither.
    """
    if isinstance(model, linen.Module):
        return _linen(model, around_norm)
    if isinstance(model, nnx.Module):
        return _nnx(model, around_norm)
    what = f"the class {model.__name__}; pass an instance" if isinstance(model, type) else f"a {type(model).__name__}"
    raise ConfigError(f"model: expected a flax.linen.Module or flax.nnx.Module instance, got {what}.")


def _linen(module: linen.Module, around_norm: AroundNorm | None) -> Model:
    modes = _modes(type(module).__call__)
    evaluating: dict[str, Any] = {name: not on for name, on in modes.items()}

    def init(key: jax.Array, inputs: Any) -> tuple[Any, Any]:
        params_key, dropout_key = jax.random.split(key)
        variables = dict(module.init({"params": params_key, RNG_STREAM: dropout_key}, inputs, **evaluating))
        return variables.pop("params", {}), variables

    def train_apply(params: Any, carried: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
        rngs = {} if key is None else {RNG_STREAM: key}
        with _intercepted(around_norm):
            outputs, changed = module.apply({"params": params, **carried}, inputs, rngs=rngs, mutable=list(carried), **modes)
        return outputs, {**carried, **changed}

    def eval_apply(params: Any, carried: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
        with _intercepted(around_norm):
            return module.apply({"params": params, **carried}, inputs, **evaluating), carried

    def needs_key(params: Any, carried: Any, inputs: Any) -> bool:
        try:
            jax.eval_shape(lambda p, c, x: train_apply(p, c, x, None), params, carried, inputs)
        except flax.errors.InvalidRngError:
            return True
        return False

    def norms(params: Any, carried: Any) -> Any:
        return _owned_by(params, {path[:-1] for path, _ in jax.tree_util.tree_leaves_with_path(carried.get(STATISTICS, {}))})

    return Model(type(module).__name__, init, train_apply, eval_apply, needs_key, norms)


def _intercepted(around_norm: AroundNorm | None) -> AbstractContextManager[Any]:
    """Within it, every call of a linen module that owns running statistics goes through `around_norm`."""
    if around_norm is None:
        return nullcontext()
    inside: list[linen.Module] = []  # a call from within such a layer (super().__call__) is part of it

    def intercept(call: Any, args: Any, kwargs: Any, context: linen.module.InterceptorContext) -> Any:
        if inside or context.method_name != "__call__" or not _owns_statistics(context.module):
            return call(*args, **kwargs)
        inside.append(context.module)
        try:
            return around_norm(call)(*args, **kwargs)
        finally:
            inside.pop()

    return linen.intercept_methods(intercept)


def _owns_statistics(module: linen.Module) -> bool:
    """Whether a bound module has running statistics of its own, rather than submodules that have."""
    own = module.variables.get(STATISTICS, {}) if module.scope is not None else {}
    return any(not isinstance(value, Mapping) for value in own.values())


def _owned_by(params: Any, owners: set[Any]) -> Any:
    """A tree of booleans as `params`: whether a parameter's path without its last part is among `owners`."""
    flags = [path[:-1] in owners for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def _nnx(module: nnx.Module, around_norm: AroundNorm | None) -> Model:
    """Modes ("train", "eval") are attributes of nnx modules, so there is one graph definition for each."""

    def split() -> tuple[Any, ...]:
        return nnx.split(module, nnx.Param, ...)

    def apply_with(graphdef: Any) -> Apply:
        def apply(params: Any, carried: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
            # Variables may be changed only where they were made, so the module gets fresh ones in the innermost transformation.
            params, carried = jax.tree.map(lambda leaf: leaf, (params, carried))
            merged = nnx.merge(graphdef, params, carried)
            if around_norm is not None:
                _surround_norms(merged, around_norm)
            _name_scopes(merged)
            outputs = merged(inputs)
            return outputs, nnx.split(merged, nnx.Param, ...)[2]

        return apply

    def in_mode(set_mode: Callable[[], None]) -> Any:
        set_mode()
        return split()[0]

    eval_graph, train_graph = in_mode(module.eval), in_mode(module.train)
    _, params, carried = split()

    def norms(params: Any, carried: Any) -> Any:
        owners = {path[:-1] for path, variable in nnx.to_flat_state(carried) if isinstance(variable, nnx.BatchStat)}
        return nnx.from_flat_state([(path, variable.replace(path[:-1] in owners)) for path, variable in nnx.to_flat_state(params)])

    return Model(
        type(module).__name__,
        lambda key, inputs: (params, carried),
        apply_with(train_graph),
        apply_with(eval_graph),
        lambda *_: False,
        norms,
    )


def _surround_norms(module: nnx.Module, around_norm: AroundNorm) -> None:
    """Put `around_norm` around the call of every nnx module inside that owns running statistics; `module` must be a copy."""
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, nnx.Module) and any(isinstance(value, nnx.BatchStat) for value in vars(part).values()):
            object.__setattr__(part, "__class__", _surrounded(type(part), around_norm))


@functools.lru_cache(maxsize=64)
def _surrounded(cls: type[nnx.Module], around_norm: AroundNorm) -> type[nnx.Module]:
    """A subclass of an nnx module type with `around_norm` around its call."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around_norm(functools.partial(cls.__call__, self))(*args, **kwargs)  # type: ignore[operator]

    return type(cls.__name__, (cls,), {"__call__": call})


def _name_scopes(module: nnx.Module) -> None:
    """Put every call of an nnx module inside under a name scope, its attribute's name, as linen does; `module` must be a copy."""
    parts = {path: part for path, part in nnx.iter_graph(module) if isinstance(part, nnx.Module) and callable(part)}
    for path, part in parts.items():
        if path:
            around = max((len(other) for other in parts if len(other) < len(path) and other == path[: len(other)]), default=0)
            object.__setattr__(part, "__class__", _scoped(type(part), "/".join(map(str, path[around:]))))


@functools.lru_cache(maxsize=1024)
def _scoped(cls: type[nnx.Module], name: str) -> type[nnx.Module]:
    """A subclass of an nnx module type whose call is under a name scope."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return cls.__call__(self, *args, **kwargs)  # type: ignore[operator]

    return type(cls.__name__, (cls,), {"__call__": call})


def _modes(call: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a module's `__call__` that tell training from evaluation, with their value in training."""
    names = inspect.signature(call).parameters
    return {name: value for name, value in MODE_ARGUMENTS.items() if name in names}


def initial_params(given: Any, shapes: Any) -> Any:
    """The user's own parameters, checked against the model's shapes; `{"params": ...}` is unwrapped.

    Raises:
      ConfigError: the tree, a shape, or an element type differs.
    """
    if isinstance(given, Mapping) and set(given) == {"params"} and not (isinstance(shapes, Mapping) and set(shapes) == {"params"}):
        given = given["params"]
    if isinstance(given, nnx.State) != isinstance(shapes, nnx.State) and isinstance(shapes, nnx.State):
        given = nnx.State(given)
    found, wanted = dict(_paths(given)), dict(_paths(shapes))
    missing, extra = [p for p in wanted if p not in found], [p for p in found if p not in wanted]
    if missing or extra:
        raise ConfigError(
            f"params: the tree is not the model's: missing {_some(missing)}, unknown {_some(extra)}; the model has {_some(list(wanted))}."
        )
    for path, leaf in found.items():
        if tuple(jnp.shape(leaf)) != tuple(wanted[path].shape):
            raise ConfigError(f"params: {path} has shape {list(jnp.shape(leaf))}, the model's has {list(wanted[path].shape)}.")
    leaves = [jnp.asarray(found[path], wanted[path].dtype) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _paths(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _some(names: list[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "nothing"
