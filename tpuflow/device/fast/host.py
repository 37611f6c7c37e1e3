"""Where the fast engine's executables run: on JAX's default backend, or on a device of a CPU client of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from tpuflow.jaxprs.plugins import call_unchecked, is_packed, place

Sizes = Callable[..., Hashable]
"""Of a function's arguments, what can differ from launch to launch."""
Way = Callable[[Any], Any]
"""A function that only moves elements of an array, NumPy's or JAX's."""
Lies = PartitionSpec
WHOLE = PartitionSpec()
"""An array of which every device has all."""


class Host(Protocol):
    """What the engine asks of where it runs. `lies` says how an array is cut over several devices; on one there is nothing to say."""

    @property
    def key(self) -> Hashable:
        """What tells it from others; None for JAX's default."""
        ...

    @property
    def over(self) -> Mesh | None:
        """The devices among which a mesh's chips are divided, if there are several."""
        ...

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated. `sizes` gives all that can differ in the arguments' shapes."""
        ...

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = ...) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        ...

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = ...) -> Any:
        """A new array of zeros."""
        ...

    def array(self, x: np.ndarray, lies: Lies = ...) -> Any:
        """A new array."""
        ...

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        ...

    def rearranged(self, x: Any, way: Way | None, lies: Lies = ...) -> Any:
        """What is made of an array by a function that only moves elements; the array itself if there is none."""
        ...

    def values(self, x: Any) -> np.ndarray:
        """An array as NumPy's, whole."""
        ...

    def agreed(self, seconds: float) -> float:
        """One figure for all devices, which must do alike."""
        ...

    def waited(self, arrays: Any) -> Any:
        """What a launch without slices has given; it need not be there yet."""
        ...


class _OneDevice:
    """All lanes are on one device."""

    over = None

    def values(self, x: Any) -> np.ndarray:
        """An array as NumPy's."""
        return np.asarray(x)

    def agreed(self, seconds: float) -> float:
        """It has nobody to agree with."""
        return seconds

    def waited(self, arrays: Any) -> Any:
        """As they are: who needs them waits."""
        return arrays


class DefaultHost(_OneDevice):
    """JAX's default backend: executables are `jax.jit` functions, arrays lie where JAX puts them."""

    key = None

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated. `sizes` gives all that can differ in the arguments' shapes."""
        return jax.jit(function, donate_argnums=(2,), compiler_options=dict(options))

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = WHOLE) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = WHOLE) -> Any:
        """A new array of zeros."""
        return jnp.zeros(shape, dtype)

    def array(self, x: np.ndarray, lies: Lies = WHOLE) -> Any:
        """A new array."""
        return jnp.array(x)

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return jnp.copy(x)

    def rearranged(self, x: Any, way: Way | None, lies: Lies = WHOLE) -> Any:
        """What is made of an array by a function that only moves elements; the array itself if there is none."""
        return _plain(x) if way is None else way(_plain(x))


class PinnedHost(_OneDevice):
    """One device of a CPU client that JAX's list of backends does not know: for use inside of a backend, where JAX's default is that
    backend itself. Nothing here goes through JAX's dispatch, so neither a trace under way nor the caller's settings change it."""

    def __init__(self, device: Any):
        self.key = self.device = device
        self._sharding = SingleDeviceSharding(device)

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function, compiled once for each `sizes` of the arguments that it is called with or lowered for; its third argument is
        donated."""
        return _Pinned(self, function, options, sizes)

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = WHOLE) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return self.array(x)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], lies: Lies = WHOLE) -> Any:
        """A new array of zeros."""
        return self.array(np.zeros(shape, dtype))

    def array(self, x: np.ndarray, lies: Lies = WHOLE) -> Any:
        """A new array; `x` is copied before this returns, whatever its strides."""
        return place(x, self.device, self._sharding)

    def moved(self, x: np.ndarray) -> Any:
        """The same of values that are on the device already, which no `jax.transfer_guard` of the caller's is about."""
        with jax.transfer_guard("allow"):
            return self.array(x)

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return self.moved(np.asarray(x))

    def rearranged(self, x: Any, way: Way | None, lies: Lies = WHOLE) -> Any:
        """What is made of an array by a function that only moves elements; the array itself, if it moves none."""
        if way is None:
            return x
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


def _plain(array: Any) -> Any:
    """An array that lies on several devices of the host, as NumPy sees it."""
    several = isinstance(array, jax.Array) and len(array.devices()) > 1
    return np.asarray(array) if several else array


DEFAULT = DefaultHost()
