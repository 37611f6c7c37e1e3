"""The adapter for linen modules.

What a module sows, and from which random streams it draws, is recorded while it is traced: flax does not distinguish sown values from other
variables, nor list the streams that a module needs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import linen
from flax.core.scope import Scope
from flax.errors import InvalidRngError

from tpuflow.once import once
from tpuflow.training.adapters.model import DROPOUT, AroundNorm, Inputs, Model, modes_of, parameters_of

STATISTICS = "batch_stats"
"""The collection of running batch statistics: a module that owns variables of it is taken for a batch-normalisation layer."""
Path = tuple[str, ...]


def linen_model(module: linen.Module, around_norm: AroundNorm | None) -> Model:
    """The functions of a linen module; `around_norm` is put around every call of a batch-normalisation layer."""
    own = type(module)

    def options(given: Mapping[str, Any], *, train: bool) -> dict[str, Any]:
        """The call's keyword arguments: those that tell training from evaluation, of the method that is called, unless they are given."""
        return {**{name: on == train for name, on in modes_of(getattr(own, _name(given.get("method")))).items()}, **given}

    def init(key: jax.Array, inputs: Inputs) -> tuple[Any, Any]:
        params_key, dropout_key = jax.random.split(key)
        args, kwargs = inputs
        with _watched() as seen:
            variables = dict(module.init({"params": params_key, DROPOUT: dropout_key}, *args, **options(kwargs, train=False)))
        return variables.pop("params", {}), _without(variables, seen.sown)

    def apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: Path, *, train: bool) -> tuple[Any, Any, Any]:
        args, kwargs = inputs
        mutable, streams = list(dict.fromkeys((*carried, *wanted))), dict(rngs or {})
        with _intercepted(around_norm), nullcontext() if train else _watched(has_stream=lambda name: False):
            outputs, changed = module.apply(
                {"params": params, **carried}, *args, rngs=streams, mutable=mutable, **options(kwargs, train=train)
            )
        kept, sown = _parted(changed, carried)
        return outputs, kept, sown

    def train_apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: Path = ()) -> tuple[Any, Any, Any]:
        return apply(params, carried, inputs, rngs, wanted, train=True)

    def eval_apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: Path = ()) -> tuple[Any, Any, Any]:
        outputs, _, sown = apply(params, carried, inputs, rngs, wanted, train=False)
        return outputs, carried, sown

    def norms(params: Any, carried: Any) -> Any:
        return _owned_by(params, {path[:-1] for path, _ in jax.tree_util.tree_leaves_with_path(carried.get(STATISTICS, {}))})

    parameters = parameters_of(own.__call__)
    return Model(own.__name__, init, train_apply, eval_apply, norms, parameters, without_streams=_without_streams)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A recording: the paths (collection, *modules, name) of sown values, and the names of the random streams drawn from. `has_stream`
    answers a module that asks whether it has a stream of a name, if not what it was given does."""

    sown: set[Path] = field(default_factory=set)
    streams: dict[str, None] = field(default_factory=dict)
    has_stream: Callable[[str], bool] | None = None


_WATCHING = threading.local()


@once
def _listen() -> None:
    """Patch `Module.sow`, `Module.has_rng` and `Scope.make_rng` once, so that they record their calls; they behave as before."""
    sow, has_rng, make_rng = linen.Module.sow, linen.Module.has_rng, Scope.make_rng

    @functools.wraps(sow)
    def sow_seen(self: linen.Module, col: str, name: str, value: Any, **options: Any) -> Any:
        for seen in getattr(_WATCHING, "seen", ()):
            seen.sown.add((col, *self.path, name))
        return sow(self, col, name, value, **options)

    @functools.wraps(has_rng)
    def has_rng_seen(self: linen.Module, name: str) -> bool:
        watching: tuple[_Seen, ...] = getattr(_WATCHING, "seen", ())
        answer = next((seen.has_stream for seen in reversed(watching) if seen.has_stream is not None), None)
        if answer is None:
            return has_rng(self, name)
        there = answer(name)
        if there:
            for seen in watching:
                seen.streams[name] = None
        return there

    @functools.wraps(make_rng)
    def make_rng_seen(self: Scope, name: str = "params") -> Any:
        for seen in getattr(_WATCHING, "seen", ()):
            seen.streams[name] = None
        return make_rng(self, name)

    linen.Module.sow, linen.Module.has_rng, Scope.make_rng = sow_seen, has_rng_seen, make_rng_seen  # type: ignore[method-assign]


@contextmanager
def _watched(has_stream: Callable[[str], bool] | None = None) -> Iterator[_Seen]:
    """Record what linen modules sow and draw in this thread, within the block."""
    _listen()
    seen = _Seen(has_stream=has_stream)
    _WATCHING.seen = (*getattr(_WATCHING, "seen", ()), seen)
    try:
        yield seen
    finally:
        _WATCHING.seen = _WATCHING.seen[:-1]


@contextmanager
def _without_streams() -> Iterator[None]:
    """Within the block, a module that asks whether it has a random stream gets flax's InvalidRngError, as one that draws from it does."""

    def refused(name: str) -> bool:
        raise InvalidRngError(f"no random stream, {name!r} neither, is there")

    with _watched(has_stream=refused):
        yield


class _AnyStream(Mapping[str, jax.Array]):
    """Random streams of every name, which records the names. A linen module sees one stream, "params", and falls back to it for others."""

    def __init__(self, key: jax.Array, seen: _Seen):
        self._key, self._seen = key, seen

    def __getitem__(self, name: str) -> jax.Array:
        if name != "params":
            self._seen.streams[name] = None
        return self._key

    def __iter__(self) -> Iterator[str]:
        return iter(("params",))

    def __len__(self) -> int:
        return 1


def traced_with_streams(function: Callable[..., Any], *args: Any) -> tuple[Any, Path]:
    """Trace a function (random streams by name, *args): (the shapes of its results, the sorted names of the streams that it draws from)."""
    with _watched(has_stream=lambda name: True) as seen:
        # the key is of the trace: one made outside of it would be computed, and start a backend of JAX's for that
        shapes = jax.eval_shape(lambda *args: function(_AnyStream(jax.random.key(0), seen), *args), *args)
    return shapes, tuple(sorted(set(seen.streams) - {"params"}))


def _parted(changed: Mapping[str, Any], carried: Mapping[str, Any]) -> tuple[Any, Any]:
    """Split the collections after a call: (those carried, with the structure they had before; everything else, which was sown)."""
    kept = {name: _like(changed[name], old) if name in changed else old for name, old in carried.items()}
    return kept, {name: _beside(tree, carried.get(name)) for name, tree in changed.items()}


def _like(tree: Any, old: Any) -> Any:
    return {name: _like(tree[name], child) for name, child in old.items()} if isinstance(old, Mapping) else tree


def _beside(tree: Any, old: Any) -> Any:
    if old is None:
        return tree
    if not isinstance(tree, Mapping) or not isinstance(old, Mapping):
        return {}
    found = {name: _beside(child, old.get(name)) for name, child in tree.items()}
    return {name: child for name, child in found.items() if not isinstance(child, Mapping) or child}


def _without(tree: Any, paths: set[Path]) -> Any:
    """Nested dicts without the entries at these paths, and without dicts that become empty."""
    if () in paths:
        return {}
    if not isinstance(tree, Mapping) or not paths:
        return tree
    children = {name: _without(child, {p[1:] for p in paths if p[:1] == (name,)}) for name, child in tree.items()}
    return {name: child for name, child in children.items() if not (isinstance(child, Mapping) and not child)}


def _intercepted(around_norm: AroundNorm | None) -> AbstractContextManager[Any]:
    """Within the block, `around_norm` wraps every call of a linen module that owns running batch statistics."""
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


def _name(method: Any) -> str:
    return "__call__" if method is None else method if isinstance(method, str) else method.__name__
