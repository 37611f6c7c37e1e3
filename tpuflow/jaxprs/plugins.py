"""The private names of JAX and jaxlib that our backend needs (JAX 0.8 to 0.10): registration, lowering rules, a CPU client of its own."""

from __future__ import annotations

import ctypes
import functools
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, core, debugging, dispatch, xla_bridge
from jax._src.array import ArrayImpl
from jax._src.interpreters import mlir
from jax._src.lax import linalg
from jax._src.tpu.linalg import eigh
from jax.sharding import SingleDeviceSharding
from jaxlib import xla_client
from jaxlib.mlir.dialects import stablehlo

from tpuflow.errors import ConfigError
from tpuflow.jaxprs.compat import CALLS_OF_THE_HOST, where_no_mesh_is
from tpuflow.jaxprs.host_calls import lowering_rules
from tpuflow.jaxprs.protobuf import fields, packed
from tpuflow.once import once

_log = logging.getLogger("tpuflow.pjrt")
ARRAY: Any = ArrayImpl
"""The class of JAX's concrete arrays: `type(x) is ARRAY` takes a tenth of the time of `isinstance(x, jax.Array)`."""
_ONLY_DURING_CALL = xla_client._xla.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL


def register(name: str, table: int, priority: int) -> None:
    """Register a backend with JAX, given the address of its `PJRT_Api`, which must stay valid for ever."""
    if hasattr(xla_bridge, "_nonexperimental_plugins"):  # else a warning that the platform is experimental
        xla_bridge._nonexperimental_plugins.add(name)
    if hasattr(mlir, "_platforms_with_donation"):  # else donation is dropped, with a warning
        mlir._platforms_with_donation.append(name)
    _use_compilation_cache(name)
    xla_bridge.register_plugin(name, priority=priority, c_api=_capsule(table))


def _use_compilation_cache(platform: str) -> None:
    """Let JAX use its persistent cache for a platform. JAX decides by the platform's name, of which it knows four, although the cache works
    for any platform that can serialise executables; so ours is treated like the CPU."""
    asked = compilation_cache.is_cache_used

    def is_cache_used(backend: Any) -> bool:
        return asked(types.SimpleNamespace(platform="cpu") if backend.platform == platform else backend)

    compilation_cache.is_cache_used = is_cache_used


_CAPSULE = b"pjrt_c_api"
"""The capsule points to these bytes: they stay."""


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, _CAPSULE, None)


def lower_host_calls(platform: str, enlist: Callable[[Callable[..., Any]], int]) -> None:
    """Register for a platform how `jax.debug.print`, `jax.debug.callback`, `io_callback` and `pure_callback` are lowered (see
    `tpuflow.jaxprs.host_calls`)."""
    for primitive, rule in lowering_rules(CALLS_OF_THE_HOST, _on_cpu, enlist):
        mlir.register_lowering(primitive, rule, platform=platform)


def _on_cpu(primitive: Any, params: dict[str, Any]) -> Callable[..., Any]:
    called = functools.partial(_call_on_cpu, _callback(primitive, params), f"jax.{primitive.name}")
    return functools.partial(where_no_mesh_is, called)


def lower_as_for_tpus(platform: str) -> None:
    """Register JAX's TPU-specific lowering rules for a platform."""
    mlir.register_lowering(linalg.eigh_p, eigh._eigh_tpu_lowering, platform=platform)
    mlir.register_lowering(dispatch.device_put_p, dispatch._tpu_gpu_device_put_lowering, platform=platform)
    mlir.register_lowering(linalg.lu_p, linalg._lu_tpu_lowering_rule, platform=platform)


def _callback(primitive: Any, params: dict[str, Any]) -> Callable[..., Any]:
    """The function of a host callback, of its arrays."""
    if primitive is not debugging.debug_print_p:
        return params["callback"]
    names = ("np_printoptions", "has_placeholders", "logging_record")
    options, has_placeholders, record = (params[name] for name in names)
    show = functools.partial(debugging._format_print_callback, params["fmt"], dict(options), has_placeholders, record)
    return debugging._make_flat_callback(params["in_tree"], show, params["static_args"])


def _call_on_cpu(function: Callable[..., Any], name: str, *arrays: np.ndarray) -> list[np.ndarray]:
    """Call a host function with arrays on our CPU client, as JAX does with its CPU backend, which may not exist here. A failure is logged
    with `name`, as JAX does."""
    device = cpu_device()
    sharding = SingleDeviceSharding(device)
    with jax.default_device(device):
        try:
            found = function(*[place(np.asarray(x), device, sharding) for x in arrays])
        except BaseException:
            _log.exception("%s failed", name)
            raise
        return [np.asarray(x) for x in found or ()]


def stablehlo_versions() -> tuple[Sequence[int], Sequence[int]]:
    """The newest version of StableHLO that this jaxlib reads, and the oldest."""
    current, least = stablehlo.get_current_version(), stablehlo.get_minimum_version()
    return tuple(map(int, current.split("."))), tuple(map(int, least.split(".")))


@once
def cpu_device() -> Any:
    """The device of a CPU client of our own, which is not among JAX's backends; one for the process.

    The client is synchronous: it computes on the calling thread, which would wait anyway, saves two thread switches a call, and has nothing
    to wait for when a call returns.
    """
    return xla_client.make_cpu_client(asynchronous=False).local_devices()[0]


_NOTHING = "module { func.func public @main() { return } }"


def check_options(compile_options: bytes) -> None:
    """Have XLA check the `compiler_options` of a compilation, by compiling an empty module for the CPU with them.

    Raises:
      ConfigError: XLA has no such option, or not with such a value.
    """
    given = xla_client.CompileOptions.ParseFromString(compile_options).env_option_overrides
    if not given:
        return
    options, device = xla_client.CompileOptions(), cpu_device()
    options.env_option_overrides = given
    try:
        device.client.compile_and_load(_NOTHING, xla_client.DeviceList((device,)), options)
    except jax.errors.JaxRuntimeError as error:
        said = str(error).removeprefix("INVALID_ARGUMENT: ").rstrip(".")
        raise ConfigError(f"compiler_options: {said}. Expected options of XLA, which this device takes and needs none of.") from None


class Launcher:
    """Launches a compiled function for one device on the leaves of its arguments, arrays that lie there, without JAX's dispatch. Nothing is
    checked: neither results for NaN, which is about the user's arrays, nor layouts, of which JAX wrongly refuses those of committed arrays
    of packed types (also in `jax.jit(f).lower(x).compile()(x)` on JAX's CPU backend).

    `execute([leaves[i] for i in kept]).consume_with_handlers(handlers)` are the leaves of its results, if it `is_plain`: has no effects.
    """

    __slots__ = ("_run", "_tree", "device", "execute", "handlers", "is_plain", "kept")

    def __init__(self, compiled: Any):
        run = compiled._executable.unsafe_call
        self._run, self._tree = run, compiled.out_tree
        (self.device,) = run.xla_executable.local_devices()
        self.execute, self.handlers, self.kept = run.xla_executable.execute_sharded, run.out_handler.handlers, sorted(run.kept_var_idx)
        self.is_plain = not (run.has_unordered_effects or run.ordered_effects or run.has_host_callbacks or run.mut)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The results, in their tree."""
        if self.is_plain:
            results = self.execute([leaves[i] for i in self.kept]).consume_with_handlers(self.handlers)
        else:
            with jax.debug_nans(False), jax.debug_infs(False):
                results = self._run(*leaves)
        return jax.tree.unflatten(self._tree, results)

    def placed(self, x: Any) -> Any:
        """A number or an array of NumPy's on the device; the caller's `jax.transfer_guard` is not about it."""
        with jax.transfer_guard("allow"):
            return place(np.asarray(x), self.device, SingleDeviceSharding(self.device))


def place(x: np.ndarray, device: Any, sharding: Any) -> Any:
    """An array on a device; `x` is copied before this returns."""
    aval = core.ShapedArray(x.shape, x.dtype)
    return xla_client._xla.batched_device_put(aval, sharding, [x], [device], True, True, _ONLY_DURING_CALL, enable_x64=True)


def assigned(devices: Sequence[int]) -> bytes:
    """A serialised `DeviceAssignmentProto` of one replica and as many partitions as there are devices."""
    return xla_client.DeviceAssignment.create(np.array([devices])).serialize()


_COMPUTATION_DEVICES, _REPLICA_DEVICE_IDS = 3, 1
"""Fields of a `DeviceAssignmentProto`: a message a partition, in which there are the devices of its replicas."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The device assignment of a serialised `CompileOptionsProto`. devices: the first replica's device for each partition; empty if it is
    not given."""

    replicas: int
    partitions: int
    devices: tuple[int, ...]


def placement_of(compile_options: bytes) -> Placement:
    """How many devices a compilation is for, and which."""
    options = xla_client.CompileOptions.ParseFromString(compile_options)
    assignment = options.device_assignment
    messages = [] if assignment is None else [value for number, value in fields(assignment.serialize()) if number == _COMPUTATION_DEVICES]
    rows = [dict(fields(message))[_REPLICA_DEVICE_IDS] for message in messages if isinstance(message, bytes)]
    devices = tuple(packed(row)[0] for row in rows if isinstance(row, bytes))
    return Placement(options.num_replicas, options.num_partitions, devices)
