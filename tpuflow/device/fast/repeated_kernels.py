"""Kernels that a Program repeats, as the layers of a network do: each form is traced once.

Its jaxpr is inlined where it is called, so that XLA is given the same program. Called functions XLA inlines too, but after it has looked
for common subexpressions: it then computes again in several fusions what it would share. JAX makes such functions of the bodies of scans
that several places share, so kernels that run as loops, as most bit-exact ones do, are each traced by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.kernel import translate_kernel
from tpuflow.device.fast.reshapes import reshaped, unreshaped
from tpuflow.isa.program import Kernel, Program

Form = tuple[Hashable, tuple[int, ...]]
"""A kernel's key, and its buffers in the order in which the key numbers them."""


@dataclass
class RepeatedKernels:
    """The repeated kernels of one Program as native arithmetic lifts them, `forms` by their `id`: kernels of one form are equal but for
    names, source lines and buffers, which are alike. `functions` are the jitted functions of the forms, `tiers` the tiers that their
    translations took."""

    program: Program
    forms: dict[int, Form] = field(default_factory=dict)
    functions: dict[Hashable, Any] = field(default_factory=dict)
    tiers: dict[Hashable, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        buffers = self.program.buffers
        found = self.program.forms_by_id()
        self.forms = _repeated(
            {k: (form.with_marks(lambda b: (buffers[b].shape, buffers[b].dtype)), form.buffers) for k, form in found.items()}
        )

    def translate(
        self, kernel: Kernel, hbm: dict[int, Any], ar: LaxArithmetic, zero: Any, resting: Set[int], read_later: Set[int]
    ) -> tuple[dict[int, Any], int]:
        """As `translate_kernel`, of the whole Program's buffers; zero: what `ar` was made of."""
        form = self.forms.get(id(kernel))
        arrays = [] if form is None else [unreshaped(hbm.get(b)) for b in form[1]]
        key = None if form is None else (form[0], *_told(form[1], hbm, resting, read_later), tuple([np.shape(x) for x in arrays]))
        if form is None or self.tiers.get(key, 1) != 1:
            return translate_kernel(kernel, self.program.buffers, hbm, ar, resting, read_later)
        function = self.functions.get(key)
        if function is None:
            function = self.functions[key] = self._function(key, kernel, form[1], resting, read_later)
        new = zip(form[1], function(zero, arrays), strict=True)
        return {b: reshaped(x, self.program.buffers[b].shape) for b, x in new if x is not None}, self.tiers[key]

    def _function(self, key: Hashable, kernel: Kernel, buffers: Sequence[int], resting: Set[int], read_later: Set[int]) -> Any:
        """(zero, the arrays of a kernel's buffers, None for those that nothing wrote) -> their new contents, None for the others; both as
        they were before a last reshape, so that it and the next kernel's become one."""
        resting, read_later = resting & set(buffers), read_later & set(buffers)

        def translated(zero: Any, arrays: list[Any]) -> list[Any]:
            hbm = {b: reshaped(x, self.program.buffers[b].shape) for b, x in zip(buffers, arrays, strict=True) if x is not None}
            ar = LaxArithmetic(bitexact=False, zero=zero)
            new, self.tiers[key] = translate_kernel(kernel, self.program.buffers, hbm, ar, resting, read_later)
            return [unreshaped(new.get(b)) for b in buffers]

        return jax.jit(translated, inline=True)


def _repeated(forms: dict[int, Form]) -> dict[int, Form]:
    often = Counter(key for key, _ in forms.values())
    return {kernel: form for kernel, form in forms.items() if often[form[0]] > 1}


def _told(buffers: Sequence[int], *facts: Any) -> Iterator[tuple[bool, ...]]:
    """Which of the buffers each of some collections has."""
    return (tuple(b in fact for b in buffers) for fact in facts)
