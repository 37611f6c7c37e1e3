"""What JAX 0.8 and 0.9 name or have otherwise than JAX 0.10: the one file that asks which version is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
from jax._src import config, core
from jax._src.interpreters import partial_eval
from jax._src.lax import linalg
from jax._src.state import discharge
from jax.tree_util import Partial
from jaxlib import xla_client
from jaxlib.mlir import ir

JAX, JAXLIB = (tuple(map(int, module.__version__.split(".")[:2])) for module in (jax, jaxlib))
IS_NEWEST, HAS_NEWEST_LIBRARY = JAX >= (0, 10), JAXLIB >= (0, 10)

_config: Any = config
_core: Any = core
_discharge: Any = discharge
_linalg: Any = linalg
_ir: Any = ir
_client: Any = xla_client

hlo = _client.hlo if HAS_NEWEST_LIBRARY else _client._xla
"""XLA's modules and shardings as objects."""
PARTITIONER_OPTIONS = (("xla_enable_rgv3_materialization", False),) if HAS_NEWEST_LIBRARY else ()
"""Groups by mesh axes, which older versions do not make, lose the order of their devices on the way to StableHLO."""


def partitioner_devices(count: int) -> int:
    """How many devices the client has whose compiler partitions a module for so many: the oldest asks for all of them before it begins."""
    return count if JAXLIB < (0, 9) else 1


def varying(aval: Any) -> frozenset[str]:
    """The axes of the `shard_map`s around it that values of a type may differ along."""
    return aval.mat.varying if IS_NEWEST else aval.vma


def manual_axes(params: Any) -> frozenset[str]:
    """The axes that a `shard_map` of these parameters maps by hand."""
    return frozenset(params["newly_manual_axes" if IS_NEWEST else "manual_axes"])


def discharged(closed: Any) -> Any:
    """A closed jaxpr with arrays handed on instead of arrays that are changed in place."""
    return (_discharge.discharge_state if IS_NEWEST else _discharge.discharge_state2)(closed)


def setting_names() -> Sequence[str]:
    """The names of what `config.trace_context` gives, in order; none where JAX does not tell them."""
    return getattr(_config, "trace_context_names", tuple)()


NO_AXES = core.AxisEnv() if IS_NEWEST else _core.top_axis_env
"""What a context has where no axis is bound: JAX's only object of the kind."""
EXECUTABLE_PARAMETERS: dict[str, Any] = {} if IS_NEWEST else {"auto_spmd_lowering": False}
"""What a `pxla.UnloadedMeshExecutable` is made with besides."""


def location_kind(location: Any) -> str:
    """What a location of MLIR is: "name", "file", "callsite", "fused", or "" for others."""
    if HAS_NEWEST_LIBRARY:
        return _LOCATIONS.get(type(location).__name__, "")
    return next((kind for kind in _LOCATIONS.values() if getattr(location, f"is_a_{kind}")()), "")


_LOCATIONS = {"NameLoc": "name", "FileLineColLoc": "file", "CallSiteLoc": "callsite", "FusedLoc": "fused"}

if IS_NEWEST:
    from jax._src.random import core as random
    from jax._src.random import philox2x32, philox4x32, prng, threefry4x32

    LOWERINGS: dict[str, Callable[..., Any]] = {
        "philox2x32": philox2x32._philox2x32_lowering,
        "philox4x32": philox4x32._philox4x32_lowering,
        "threefry4x32": threefry4x32._threefry4x32_lowering,
        "ormqr": _linalg._ormqr_lowering,
    }
    """Of primitives that older versions have not: what JAX writes them as."""
else:
    from jax._src import prng, random  # pyright: ignore[reportAttributeAccessIssue]

    LOWERINGS: dict[str, Callable[..., Any]] = {}

KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg", *(name for name in LOWERINGS if name != "ormqr"))
"""JAX's own generators of random keys: all they are made of is known."""
gamma: Callable[..., Any] = random._gamma_impl  # pyright: ignore[reportAttributeAccessIssue]
iterated_vmap_binary_bcast: Callable[..., Any] = prng.iterated_vmap_binary_bcast


def bind(primitive: Any, operands: Any, params: Any) -> Any:
    """A primitive applied to operands; params: as an equation has them, with jaxprs of rules where binding takes functions."""
    found = primitive.get_bind_params(params)
    functions, rest = ((), found) if JAX >= (0, 9) else found
    return primitive.bind(*functions, *operands, **rest)


def linearize(function: Callable[..., Any], *primals: Any) -> tuple[Any, Any]:
    """`jax.linearize`, with a linear function that is a tree of all arrays it knows: results that are zeros are not, in older versions."""
    outputs, linear = jax.linearize(function, *primals)
    if IS_NEWEST:
        return outputs, linear
    lift = linear.func.fun
    *others, results = lift.args
    known = [r.get_known() if r.is_known() else None for r in results]
    unknown = [None if r.is_known() else r for r in results]
    return outputs, Partial(functools.partial(_lifted, lift.func, others, unknown), known, *linear.args)


def _lifted(lift: Callable[..., Any], others: Any, unknown: Any, known: Any, *arguments: Any) -> Any:
    """What is linear, with the results that are known put among those that are not."""
    results = [partial_eval.PartialVal.known(k) if u is None else u for k, u in zip(known, unknown, strict=True)]
    return lift(*others, results, *arguments)
