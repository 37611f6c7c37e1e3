"""Complex arguments and results: a Program takes and gives their real and imaginary planes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.jaxprs.compat import ClosedJaxpr, at_host, is_at_host, is_token, jaxpr_as_fun
from tpuflow.jaxprs.shardings import specs_of

T = TypeVar("T")


def is_complex(aval: Any) -> bool:
    """Whether values of a type are complex64."""
    return not is_token(aval) and aval.dtype == np.complex64


def with_planes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function of planes, in the order of the complex values that they stand for; it gives planes."""
    types = closed.in_avals
    flat = [plane for s in specs_of(types) for plane in (_plane_specs(s) if is_complex(s) else (s,))]

    def of_planes(*arrays: Any) -> list[Any]:
        return split(jaxpr_as_fun(closed)(*joined(arrays, types)), closed.out_avals)

    return jax.make_jaxpr(of_planes)(*flat)


def _plane_specs(spec: Any) -> tuple[Any, Any]:
    real = jax.ShapeDtypeStruct(spec.shape, np.float32)
    plane = at_host(real) if is_at_host(spec) else real
    return plane, plane


def split(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Values of these types with the planes of complex ones in their place."""
    return [plane for x, aval in zip(values, avals, strict=True) for plane in (_planes(x) if is_complex(aval) else (x,))]


def _planes(x: Any) -> tuple[Any, Any]:
    return (np.array(x.real), np.array(x.imag)) if isinstance(x, np.ndarray) else (jnp.real(x), jnp.imag(x))


def joined(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """The opposite of `split`."""
    left = iter(arrays)
    return [jax.lax.complex(jnp.asarray(next(left)), jnp.asarray(next(left))) if is_complex(aval) else next(left) for aval in avals]


def each_plane(facts: Iterable[T], avals: Sequence[Any]) -> tuple[T, ...]:
    """What is known of each value, for each of its planes."""
    return tuple(fact for fact, aval in zip(facts, avals, strict=True) for _ in range(2 if is_complex(aval) else 1))


def plane_names(names: Sequence[str], avals: Sequence[Any]) -> tuple[str, ...]:
    """Names of values, with ".real" and ".imag" for the planes of complex ones."""
    parts = zip(names, avals, strict=True)
    return tuple(f"{name}{part}" for name, aval in parts for part in ((".real", ".imag") if is_complex(aval) else ("",)))
