"""Where the fast engine's executables run: on JAX's default backend, or on a device of a CPU client of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from tpuflow.jaxprs.plugins import call_unchecked, is_packed, place

Sizes = Callable[..., Hashable]
"""Of a function's arguments, what can differ from launch to launch."""


class DefaultHost:
    """JAX's default backend: executables are `jax.jit` functions, arrays lie where JAX puts them."""

    key = None

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated. `sizes` gives all that can differ in the arguments' shapes."""
        return jax.jit(function, donate_argnums=(2,), compiler_options=dict(options))

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array of zeros."""
        return jnp.zeros(shape, dtype)

    def array(self, x: np.ndarray) -> Any:
        """A new array."""
        return jnp.array(x)

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return jnp.copy(x)

    def rearranged(self, x: Any, way: Callable[[Any], Any]) -> Any:
        """What is made of an array by a function that only moves elements, of NumPy's arrays or JAX's."""
        return way(x)


class PinnedHost:
    """One device of a CPU client that JAX's list of backends does not know: for use inside of a backend, where JAX's default is that
    backend itself. Nothing here goes through JAX's dispatch, so neither a trace under way nor the caller's settings change it."""

    def __init__(self, device: Any):
        self.key = self.device = device
        self._sharding = SingleDeviceSharding(device)

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function, compiled once for each `sizes` of the arguments that it is called with or lowered for; its third argument is
        donated."""
        return _Pinned(self, function, options, sizes)

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return self.array(x)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array of zeros."""
        return self.array(np.zeros(shape, dtype))

    def array(self, x: np.ndarray) -> Any:
        """A new array; `x` is copied before this returns, whatever its strides."""
        return place(x, self.device, self._sharding)

    def moved(self, x: np.ndarray) -> Any:
        """The same of values that are on the device already, which no `jax.transfer_guard` of the caller's is about."""
        with jax.transfer_guard("allow"):
            return self.array(x)

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return self.moved(np.asarray(x))

    def rearranged(self, x: Any, way: Callable[[Any], Any]) -> Any:
        """What is made of an array by a function that only moves elements; the array itself, if it moves none."""
        values = np.asarray(x)
        made = way(values)
        return x if made is values else self.moved(made)

    @contextmanager
    def translating(self) -> Iterator[None]:
        """JAX with its own settings, and this device for what is computed while a function is traced."""
        with ExitStack() as settings:
            for setting in (
                jax.default_device(self.device),
                jax.disable_jit(False),
                jax.enable_x64(False),
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.numpy_rank_promotion("allow"),
                jax.numpy_dtype_promotion("standard"),
                jax.default_matmul_precision(None),
                jax.check_tracer_leaks(False),
            ):
                settings.enter_context(setting)
            yield


class _Pinned:
    """A function on a pinned host."""

    def __init__(self, host: PinnedHost, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes):
        self._host, self._sizes = host, sizes
        self._jit = jax.jit(function, donate_argnums=(2,), compiler_options=dict(options))
        self._compiled: dict[Hashable, Any] = {}
        self._packed = False

    def __call__(self, *arguments: Any) -> Any:
        compiled = self._compiled.get(self._sizes(*arguments))
        if compiled is None:
            specs = jax.tree.map(lambda x: self._host.spec(x.shape, x.dtype), arguments)
            compiled = self.lower(*specs).compile()
        if self._packed:
            return call_unchecked(compiled, *arguments)
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:  # type: ignore[attr-defined]
            with jax.debug_nans(False), jax.debug_infs(False):  # about the user's arrays: who calls us looks at the results
                return compiled(*arguments)
        return compiled(*arguments)

    def lower(self, *arguments: Any) -> _Lowered:
        """What `jax.jit` calls so; compiling it keeps the result for calls."""
        self._packed = any(is_packed(x.dtype) for x in jax.tree.leaves(arguments))
        with self._host.translating():
            return _Lowered(self, self._sizes(*arguments), self._jit.lower(*arguments))


class _Lowered:
    """A pinned function in XLA's terms, for arguments of given sizes."""

    def __init__(self, function: _Pinned, sizes: Hashable, lowered: Any):
        self._function, self._sizes, self._lowered = function, sizes, lowered

    def as_text(self) -> str:
        """StableHLO."""
        return self._lowered.as_text()

    def compile(self) -> Any:
        """Compile now."""
        with self._function._host.translating():
            compiled = self._lowered.compile()
        return self._function._compiled.setdefault(self._sizes, compiled)


Host = DefaultHost | PinnedHost
DEFAULT = DefaultHost()
