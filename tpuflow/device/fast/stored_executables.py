"""Functions compiled for arguments of given sizes, on any thread; their executables are in the persistent cache, if there is one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from tpuflow.device.fast.host import Sizes
from tpuflow.entries import Entries
from tpuflow.jaxprs.compat import avals_on_one_device, computes_plainly, traced_under
from tpuflow.jaxprs.executables import compile_anew, executable_bytes, host_key, load_executable, settings_text
from tpuflow.jaxprs.persistent import key_of
from tpuflow.jaxprs.plugins import ARRAY, Launcher

DONATED = 2


class CachedFunction:
    """A function on JAX's default backend, which must be one CPU device; called as `jax.jit` of it, with its third argument donated.

    entries: the persistent cache: the function is traced and compiled only if that has no entry for it. identity: text that is equal for
    the same function in another process. results: the lengths of the lists that it returns. tiers: the dictionary that tracing fills with
    the tier of every kernel, which is stored with the executable.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, str],
        sizes: Sizes,
        entries: Entries | None,
        identity: str,
        results: Sequence[int],
        tiers: dict[str, int],
    ):
        self._jit = jax.jit(function, donate_argnums=(DONATED,), compiler_options=dict(options))
        self._identity = f"{identity} {sorted(options.items())}"
        self._sizes, self._entries, self._results, self._tiers = sizes, entries, results, tiers
        self._compiled: dict[Hashable, tuple[Any, Launcher]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; at the first call with arguments of these sizes its executable is taken from the cache, or compiled."""
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:  # type: ignore[attr-defined]
            return self._jit(*arguments)  # which looks at every result
        key = self._sizes(*arguments), traced_under()
        if key not in self._compiled:
            self.lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)).compile()
        compiled, launcher = self._compiled[key]
        leaves = [x if type(x) is ARRAY else launcher.placed(x) for x in jax.tree.leaves(arguments)]
        found = avals_on_one_device(leaves)
        if found is not None and found[0] == launcher.device and launcher.is_plain and computes_plainly():
            return launcher(leaves)
        return compiled(*arguments)

    def lower(self, *specs: Any) -> _Lowered:
        """As `lower` of a `jax.jit` function, but nothing is traced if the cache has an entry."""
        return _Lowered(self, specs, self._sizes(*specs), traced_under())

    def _name(self, specs: Sequence[Any], settings: Any) -> str | None:
        """The name of an entry of the cache; None if there can be none."""
        text = None if self._entries is None else settings_text(settings)
        return None if text is None else f"executable-{key_of(self._identity, repr(specs), text, host_key())}"


class _Lowered:
    """A cached function for arguments of given shapes (as `jax.stages.Lowered`), under the `settings` of the thread that makes it; any
    thread may compile it."""

    def __init__(self, function: CachedFunction, specs: Sequence[Any], sizes: Hashable, settings: Any):
        self._function, self._specs, self._key, self._settings = function, specs, (sizes, settings), settings
        self._name = self._entry = self._traced = None
        if self._key not in function._compiled:
            self._name = function._name(specs, settings)
            self._entry = None if self._name is None or function._entries is None else function._entries.get(self._name)
            self._traced = function._jit.lower(*specs) if self._entry is None else None

    def as_text(self) -> str:
        """StableHLO."""
        return self._function._jit.lower(*self._specs).as_text()

    def compile(self) -> Any:
        """The executable, from the cache or compiled now; calls with these shapes use it from now on.

        Raises:
          ValueError: the entry in the cache is of no use, and this thread has other settings than those to trace the function under.
        """
        kept = self._function._compiled
        if self._key not in kept:
            compiled = self._compiled(self._traced) if self._entry is None else self._loaded(self._entry)
            kept[self._key] = compiled, Launcher(compiled)
        return kept[self._key][0]

    def _loaded(self, entry: bytes) -> Any:
        function = self._function
        try:
            compiled, tiers = load_executable(entry, self._specs, DONATED, function._results)
        except ValueError as problem:
            assert function._entries is not None and self._name is not None
            function._entries.discard(self._name, str(problem))
            if traced_under() != self._settings:
                raise
            return self._compiled(function._jit.lower(*self._specs))
        function._tiers.update(tiers)
        return compiled

    def _compiled(self, traced: Any) -> Any:
        function = self._function
        if function._entries is None or self._name is None:
            return traced.compile()
        compiled = compile_anew(traced)
        if (entry := executable_bytes(compiled, function._tiers)) is not None:
            function._entries.put(self._name, entry)
        return compiled
