"""Serialising XLA's executables for one device without pickle (JAX 0.8 to 0.10).

The bytes are a JSON header and XLA's own serialisation, which is machine code, so they must come from a trusted source. JAX's
`serialize_executable` pickles its header, whose bytes could call anything while they are loaded.
"""

from __future__ import annotations

import enum
import json
import os
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, core
from jax._src.interpreters import pxla
from jax.sharding import SingleDeviceSharding
from jaxlib import xla_client

from tpuflow.jaxprs import versions

_LENGTH_BYTES = 4
_PLAIN = (bool, int, float, str, enum.Enum, type(None))


_here = threading.local()


def compile_anew(lowered: Any) -> Any:
    """Compile without JAX's persistent cache: an executable that XLA has deserialised cannot be serialised completely again."""
    asked = compilation_cache.is_cache_used
    if not hasattr(asked, "spared"):
        compilation_cache.is_cache_used = _spared(asked)
    _here.anew = True
    try:
        return lowered.compile()
    finally:
        _here.anew = False


def _spared(asked: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wraps JAX's `is_cache_used`: False while this thread is in `compile_anew`."""

    def is_cache_used(backend: Any) -> bool:
        return not getattr(_here, "anew", False) and asked(backend)

    is_cache_used.spared = True
    return is_cache_used


def executable_bytes(compiled: Any, notes: Any) -> bytes | None:
    """Serialise a `jax.stages.Compiled` with `notes`, plain data; None if it calls the host or holds arrays, which cannot be serialised."""
    inner = compiled._executable._unloaded_executable
    if inner.unordered_effects or inner.ordered_effects or inner.host_callbacks or inner.mut or compiled._params.const_args:
        return None
    outputs = [(list(aval.shape), aval.dtype.name, aval.weak_type) for aval in inner.output_avals]
    header = json.dumps({"name": inner.name, "kept": sorted(inner.kept_var_idx), "outputs": outputs, "notes": notes}).encode()
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + inner.xla_executable.serialize()


def load_executable(data: bytes, arguments: Sequence[Any], donated: int, outputs: Sequence[int]) -> tuple[Any, Any]:
    """The inverse of `executable_bytes`: (a `jax.stages.Compiled` on JAX's default device, its notes).

    arguments: the trees of `jax.ShapeDtypeStruct` that it was lowered for; donated: the number of the donated one; outputs: the lengths of
    the lists of arrays that it returns.

    Raises:
      ValueError: the bytes are of another executable, or none that this machine can load.
    """
    try:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:start])
        found = [core.ShapedArray(tuple(shape), np.dtype(dtype), weak_type=weak) for shape, dtype, weak in header["outputs"]]
        if len(found) != sum(outputs):
            raise ValueError(f"{len(found)} results, expected {sum(outputs)}")
        loaded = _loaded(data[start:], header, jax.tree.leaves(arguments), found)
    except (KeyError, TypeError, jax.errors.JaxRuntimeError) as problem:
        raise ValueError(f"no executable ({type(problem).__name__}: {problem})") from problem
    info = tuple(_info(argument, given=place == donated) for place, argument in enumerate(arguments))
    tree = jax.tree.structure(tuple([0] * count for count in outputs))
    return jax.stages.Compiled(loaded, [], (info, {}), tree), header["notes"]


def _info(argument: Any, *, given: bool) -> Any:
    return jax.tree.map(lambda x: jax.stages.ArgInfo(core.ShapedArray(x.shape, x.dtype), given), argument)


def _loaded(code: bytes, header: Any, specs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    (device,) = jax.devices()
    devices, sharding = xla_client.DeviceList((device,)), SingleDeviceSharding(device)
    kept = [core.ShapedArray(specs[place].shape, specs[place].dtype) for place in header["kept"]]
    ins, outs = [None] * len(kept), [None] * len(outputs)
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=device.client.deserialize_executable(code, executable_devices=devices),
        device_list=devices, backend=device.client, committed=False, name=header["name"],
        input_avals=kept, input_shardings=[sharding] * len(kept), output_avals=outputs, output_shardings=[sharding] * len(outputs),
        unordered_effects=[], ordered_effects=[], keepalive=(), host_callbacks=(), kept_var_idx=set(header["kept"]), mut=None,
        xla_in_layouts=ins, dispatch_in_layouts=ins, xla_out_layouts=outs, all_args_info=None, pgle_profiler=None,
        **versions.EXECUTABLE_PARAMETERS,
    )  # fmt: skip
    return unloaded.load()


def can_keep() -> bool:
    """Whether JAX's backend is one CPU device, so that its executables are valid in any process on the same kind of processor."""
    devices = jax.devices()
    return len(devices) == 1 and devices[0].platform == "cpu"


def host_key() -> str:
    """A key of the host: the processor's instruction set and XLA's flags, on which executables depend."""
    (device,) = jax.devices()
    processor = xla_client.get_topology_for_devices([device]).fingerprint()
    return f"{platform.machine()} {processor} {os.environ.get('XLA_FLAGS', '')}"


def settings_text(settings: Any) -> str | None:
    """The settings from `traced_under` as text that is the same in every process; None if they contain a mesh or the like. Named axes are
    left out: a launch takes arrays, which have none."""
    values = [x for x in settings if not isinstance(x, core.AxisEnv)]
    return repr(values) if all(x == () or isinstance(x, _PLAIN) for x in values) else None
