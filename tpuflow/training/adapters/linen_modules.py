"""linen modules as `Model`s: what they sow, and the random streams that they draw from, are seen while they are traced."""

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

from tpuflow.training.adapters.model import DROPOUT, AroundNorm, Inputs, Model, modes_of, parameters_of

STATISTICS = "batch_stats"
"""The collection of running statistics of batches: a module that owns variables of it normalises by the batch."""
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
        with _intercepted(around_norm):
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

    return Model(own.__name__, init, train_apply, eval_apply, norms, parameters_of(own.__call__))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What linen modules did while they were watched: paths of what they sowed (collection, modules, name), streams drawn from."""

    sown: set[Path] = field(default_factory=set)
    streams: dict[str, None] = field(default_factory=dict)


_WATCHING = threading.local()


@functools.cache
def _listen() -> None:
    """Have flax tell, once and for all; what it does is as it was."""
    sow, make_rng = linen.Module.sow, Scope.make_rng

    @functools.wraps(sow)
    def sow_seen(self: linen.Module, col: str, name: str, value: Any, **options: Any) -> Any:
        for seen in getattr(_WATCHING, "seen", ()):
            seen.sown.add((col, *self.path, name))
        return sow(self, col, name, value, **options)

    @functools.wraps(make_rng)
    def make_rng_seen(self: Scope, name: str = "params") -> Any:
        for seen in getattr(_WATCHING, "seen", ()):
            seen.streams[name] = None
        return make_rng(self, name)

    linen.Module.sow, Scope.make_rng = sow_seen, make_rng_seen  # type: ignore[method-assign]


@contextmanager
def _watched() -> Iterator[_Seen]:
    """Within it, what linen modules of this thread sow and draw is noted: flax itself tells it apart from other variables nowhere."""
    _listen()
    seen = _Seen()
    _WATCHING.seen = (*getattr(_WATCHING, "seen", ()), seen)
    try:
        yield seen
    finally:
        _WATCHING.seen = _WATCHING.seen[:-1]


class _AnyStream(Mapping[str, jax.Array]):
    """Streams of every name. Handed to a linen module it is the stream "params", which modules draw from where they miss their own."""

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
    """(shapes, names): what a function (random streams by name, *args) gives for these shapes, and which streams it draws from, sorted."""
    with _watched() as seen:
        # the key is of the trace: one made outside of it would be computed, and start a backend of JAX's for that
        shapes = jax.eval_shape(lambda *args: function(_AnyStream(jax.random.key(0), seen), *args), *args)
    return shapes, tuple(sorted(set(seen.streams) - {"params"}))


def _parted(changed: Mapping[str, Any], carried: Mapping[str, Any]) -> tuple[Any, Any]:
    """(collections with the structure of the carried ones, the rest): what is sown into one of these is no variable of it."""
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
    """Nested dicts without what lies at these paths, and without dicts that are empty for it."""
    if () in paths:
        return {}
    if not isinstance(tree, Mapping) or not paths:
        return tree
    children = {name: _without(child, {p[1:] for p in paths if p[:1] == (name,)}) for name, child in tree.items()}
    return {name: child for name, child in children.items() if not (isinstance(child, Mapping) and not child)}


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


def _name(method: Any) -> str:
    return "__call__" if method is None else method if isinstance(method, str) else method.__name__
