"""Where the fast engine's executables run: on JAX's default backend, or on a device of a CPU client of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from tpuflow.jaxprs.plugins import ARRAY, Launcher, place

Sizes = Callable[..., Hashable]
"""The arguments of a function -> the part of their shapes that can differ from launch to launch."""
Move = Callable[[Any], Any]
"""A function that only moves the elements of an array, NumPy's or JAX's."""
REPLICATED = PartitionSpec()
"""Every device has the whole array."""


class Host(Protocol):
    """Where the engine's executables run and their arrays are. `partition` shards an array over several devices; one device ignores it."""

    @property
    def key(self) -> Hashable:
        """Distinguishes hosts in the cache of engines; None for JAX's default backend."""
        ...

    @property
    def over(self) -> Mesh | None:
        """The mesh of devices over which the Program's chips are divided, if there are several."""
        ...

    @property
    def takes_compiled(self) -> bool:
        """Whether calls of a function of `jit` take what another thread has compiled of it, once it was lowered."""
        ...

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated. `sizes` gives all that can differ in the arguments' shapes."""
        ...

    def launcher(self, function: Any, sizes: Sizes, arguments: Sequence[Any]) -> Launcher | None:
        """What launches a function of `jit`, for arguments that it has been called with, without JAX's dispatch; None if nothing may."""
        ...

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = ...) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        ...

    def scalar(self, x: np.ndarray) -> Any:
        """A number that is an argument of every launch."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = ...) -> Any:
        """A new array of zeros."""
        ...

    def array(self, x: np.ndarray, partition: PartitionSpec = ...) -> Any:
        """A new array."""
        ...

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        ...

    def rearranged(self, x: Any, move: Move | None, partition: PartitionSpec = ...) -> Any:
        """`move(x)`; `x` itself if there is no move."""
        ...

    def values(self, x: Any) -> np.ndarray:
        """The whole array as NumPy's."""
        ...

    def max_over_devices(self, seconds: float) -> float:
        """The greatest of the devices' numbers, so that all of them choose alike."""
        ...

    def waited(self, arrays: Any) -> Any:
        """The results of a launch without slices, waited for if only a wait would show that the launch failed."""
        ...


class _OneDevice:
    """A host whose one device runs all chips."""

    over = None
    takes_compiled = False

    def values(self, x: Any) -> np.ndarray:
        """An array as NumPy's."""
        return np.asarray(x)

    def max_over_devices(self, seconds: float) -> float:
        """The number of the only device."""
        return seconds

    def waited(self, arrays: Any) -> Any:
        """The arrays as they are, possibly still being computed."""
        return arrays


class DefaultHost(_OneDevice):
    """JAX's default backend: executables are `jax.jit` functions, arrays lie where JAX puts them."""

    key = None

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function as XLA runs it; its third argument is donated. `sizes` gives all that can differ in the arguments' shapes."""
        return jax.jit(function, donate_argnums=(2,), compiler_options=dict(options))

    def launcher(self, function: Any, sizes: Sizes, arguments: Sequence[Any]) -> Launcher | None:
        """What launches the function's executable, where the arguments are on its device."""
        found = Launcher(function.lower(*arguments).compile())
        return found if all(x.devices() == {found.device} for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)) else None

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = REPLICATED) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = REPLICATED) -> Any:
        """A new array of zeros."""
        return jnp.zeros(shape, dtype)

    def array(self, x: np.ndarray, partition: PartitionSpec = REPLICATED) -> Any:
        """A new array."""
        return jnp.array(x)

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return jnp.copy(x)

    def rearranged(self, x: Any, move: Move | None, partition: PartitionSpec = REPLICATED) -> Any:
        """`move(x)`; `x` itself if there is no move."""
        return _plain(x) if move is None else move(_plain(x))


class PinnedHost(_OneDevice):
    """One device of a CPU client that is not among JAX's backends: for use inside of a backend of ours, where JAX's default backend is that
    backend itself. Nothing here goes through JAX's dispatch, so neither a trace under way nor the caller's settings change it."""

    takes_compiled = True

    def __init__(self, device: Any):
        self.key = self.device = device
        self._sharding = SingleDeviceSharding(device)

    def jit(self, function: Callable[..., Any], options: Mapping[str, str], sizes: Sizes) -> Callable[..., Any]:
        """The function, compiled once for each `sizes` of the arguments that it is called with or lowered for; its third argument is
        donated."""
        return _Pinned(self, function, options, sizes)

    def launcher(self, function: Any, sizes: Sizes, arguments: Sequence[Any]) -> Launcher | None:
        """What launches the function's executable, if it is compiled."""
        return function.launcher(sizes(*arguments))

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = REPLICATED) -> jax.ShapeDtypeStruct:
        """An argument to translate for."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def scalar(self, x: np.ndarray) -> Any:
        """Numbers that go with every launch."""
        return self.array(x)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], partition: PartitionSpec = REPLICATED) -> Any:
        """A new array of zeros."""
        return self.array(np.zeros(shape, dtype))

    def array(self, x: np.ndarray, partition: PartitionSpec = REPLICATED) -> Any:
        """A new array; `x` is copied before this returns, whatever its strides."""
        return place(x, self.device, self._sharding)

    def moved(self, x: np.ndarray) -> Any:
        """As `array`, of values that are on the device already: the caller's `jax.transfer_guard` is not about them."""
        with jax.transfer_guard("allow"):
            return self.array(x)

    def copy(self, x: Any) -> Any:
        """The same values in memory of their own."""
        return self.moved(np.asarray(x))

    def rearranged(self, x: Any, move: Move | None, partition: PartitionSpec = REPLICATED) -> Any:
        """`move(x)`; `x` itself if there is no move, or it changes nothing."""
        if move is None:
            return x
        values = np.asarray(x)
        made = move(values)
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
        self._compiled: dict[Hashable, tuple[Any, Launcher]] = {}

    def __call__(self, *arguments: Any) -> Any:
        found = self._compiled.get(sizes := self._sizes(*arguments))
        if found is None:
            self.lower(*jax.tree.map(lambda x: self._host.spec(x.shape, x.dtype), arguments)).compile()
            found = self._compiled[sizes]
        _, launch = found
        return launch([x if type(x) is ARRAY else self._host.moved(np.asarray(x)) for x in jax.tree.leaves(arguments)])

    def lower(self, *arguments: Any) -> _Lowered:
        """As `lower` of a `jax.jit` function; compiling the result keeps the executable for calls."""
        with self._host.translating():
            return _Lowered(self, self._sizes(*arguments), self._jit.lower(*arguments))

    def launcher(self, sizes: Hashable) -> Launcher | None:
        """What launches the executable for arguments of these sizes, if it is compiled."""
        return self._compiled.get(sizes, (None, None))[1]

    def keep(self, sizes: Hashable, compiled: Any) -> Any:
        """Launch this executable where the arguments are of these sizes, unless another is kept already; returns the one that is kept."""
        return self._compiled.setdefault(sizes, (compiled, Launcher(compiled)))[0]


class _Lowered:
    """A pinned function, lowered for arguments of given sizes (as `jax.stages.Lowered`)."""

    def __init__(self, function: _Pinned, sizes: Hashable, lowered: Any):
        self._function, self._sizes, self._lowered = function, sizes, lowered

    def as_text(self) -> str:
        """StableHLO."""
        return self._lowered.as_text()

    def compile(self) -> Any:
        """Compile now."""
        with self._function._host.translating():
            compiled = self._lowered.compile()
        return self._function.keep(self._sizes, compiled)


def _plain(array: Any) -> Any:
    """An array that lies on several devices of the host, as NumPy sees it."""
    several = isinstance(array, jax.Array) and len(array.devices()) > 1
    return np.asarray(array) if several else array


DEFAULT = DefaultHost()
