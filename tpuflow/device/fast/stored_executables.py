"""Functions whose executables are in the persistent cache: traced and compiled only if the cache has no entry for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from tpuflow.device.fast.host import Sizes
from tpuflow.entries import Entries
from tpuflow.jaxprs.executables import compile_anew, executable_bytes, host_key, load_executable, settings_text, traced_under
from tpuflow.jaxprs.persistent import key_of

DONATED = 2


class CachedFunction:
    """A function on JAX's default backend, which must be one CPU device; called as `jax.jit` of it, with its third argument donated.

    identity: text that is equal for the same function in another process. results: the lengths of the lists that it returns. tiers: the
    dictionary that tracing fills with the tier of every kernel, which is stored with the executable.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, str],
        sizes: Sizes,
        entries: Entries,
        identity: str,
        results: Sequence[int],
        tiers: dict[str, int],
    ):
        self._jit = jax.jit(function, donate_argnums=(DONATED,), compiler_options=dict(options))
        self._identity = f"{identity} {sorted(options.items())}"
        self._sizes, self._entries, self._results, self._tiers = sizes, entries, results, tiers
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; at the first call with arguments of these sizes its executable is taken from the cache, or compiled."""
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:  # type: ignore[attr-defined]
            return self._jit(*arguments)  # which looks at every result
        compiled = self._compiled.get((self._sizes(*arguments), traced_under()))
        if compiled is None:
            compiled = self.lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)).compile()
        return compiled(*arguments)

    def lower(self, *specs: Any) -> _Lowered:
        """As `lower` of a `jax.jit` function, but nothing is traced before `compile` finds no entry in the cache."""
        return _Lowered(self, specs)

    def _ready(self, specs: Sequence[Any]) -> Any:
        key = self._sizes(*specs), traced_under()
        if key not in self._compiled:
            settings = settings_text(key[1])
            self._compiled[key] = self._jit.lower(*specs).compile() if settings is None else self._found(specs, settings)
        return self._compiled[key]

    def _found(self, specs: Sequence[Any], settings: str) -> Any:
        name = f"executable-{key_of(self._identity, repr(specs), settings, host_key())}"
        if (data := self._entries.get(name)) is not None:
            try:
                compiled, tiers = load_executable(data, specs, DONATED, self._results)
                self._tiers.update(tiers)
                return compiled
            except ValueError as problem:
                self._entries.discard(name, str(problem))
        compiled = compile_anew(self._jit.lower(*specs))
        if (data := executable_bytes(compiled, self._tiers)) is not None:
            self._entries.put(name, data)
        return compiled


class _Lowered:
    """A cached function for arguments of given shapes (as `jax.stages.Lowered`)."""

    def __init__(self, function: CachedFunction, specs: Sequence[Any]):
        self._function, self._specs = function, specs

    def as_text(self) -> str:
        """StableHLO."""
        return self._function._jit.lower(*self._specs).as_text()

    def compile(self) -> Any:
        """The executable, from the cache or compiled now; calls with these shapes use it from now on."""
        return self._function._ready(self._specs)
