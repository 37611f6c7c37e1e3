"""Floats that become integers, and these the same floats again: nothing is computed, natively.

`lax.top_k` orders floats by integers that the Program makes of their bits. XLA:CPU's TopK takes floats, which `lax_sort` makes of the
integers: the same ones, so that neither is worth a pass over memory. On either half of the 32-bit words, those with the sign set and those
without, every bit of what the operations between the two make is a sum modulo 2 of some of a word's bits and a constant. Two such functions
are the same if they agree about the first word of each half and about those that differ from it in one bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.device.fast.rewriting import Env, Variable
from tpuflow.isa.program import Program
from tpuflow.isa.vector import Sort
from tpuflow.jaxprs.compat import Equation, Jaxpr, Literal

WORDS = np.array([half | bit for half in (0, 1 << 31) for bit in (0, *(1 << i for i in range(31)))], np.uint32)
"""Those words."""
HALF = len(WORDS) // 2
MOST_OPERATIONS = 32
"""How many operations are looked through."""


class Unknown(Exception):
    """A value that is not such a function of the words of one array."""


@dataclass(frozen=True)
class Same:
    """A result that is another array, but for its shape."""

    result: Variable
    source: Variable

    def values(self, env: Env) -> dict[Variable, Any]:
        """The other array."""
        return {self.result: env[self.source].reshape(self.result.aval.shape)}


def sorts_integers(program: Program) -> bool:
    """Whether a kernel sorts by integers of 32 bits: what is worth looking at."""
    sorts = (i for kernel in program.distinct_kernels() for i in kernel.instructions if isinstance(i, Sort))
    return any(i.srcs[0].dtype.kind in ("int", "uint") and i.srcs[0].dtype.bytes == 4 for i in sorts)


def round_trips(jaxpr: Jaxpr, constants: Env) -> dict[Variable, Same]:
    """The floats of a jaxpr that were integers, and the same floats before."""
    makers: dict[Variable, Equation] = {v: e for e in jaxpr.eqns for v in e.outvars}
    found = {}
    for equation in jaxpr.eqns:
        var: Variable = equation.outvars[0]
        if equation.primitive.name == "bitcast_convert_type" and var.aval.dtype == np.float32:
            chain = _Chain(makers)
            try:
                same = np.array_equal(chain.words(equation.invars[0]), WORDS)
            except Unknown:
                continue
            if same and chain.source is not None:
                found[var] = Same(var, chain.source)
    return found


class _Chain:
    """The operations on the words of one array of f32, `source`, that lead to another."""

    def __init__(self, makers: Mapping[Variable, Equation]):
        self.makers, self.source, self.known, self.left = makers, None, {}, MOST_OPERATIONS

    def words(self, atom: Variable) -> np.ndarray:
        """What each of `WORDS` becomes; a constant of one number has no axis."""
        if isinstance(atom, Literal):
            return _word(atom)
        if atom not in self.known:
            self.known[atom] = self._made(atom)
        return self.known[atom]

    def _made(self, var: Variable) -> np.ndarray:
        equation = self.makers.get(var)
        self.left -= 1
        if equation is None or self.left < 0:
            raise Unknown
        name = equation.primitive.name
        operands: list[Variable] = list(equation.invars)
        if name == "bitcast_convert_type" and operands[0].aval.dtype == np.float32:
            return self._of_source(operands[0])
        if name == "optimization_barrier":
            return self.words(operands[equation.outvars.index(var)])
        if name in ("reshape", "broadcast_in_dim"):
            found = self.words(operands[0])
            return found if name == "reshape" else _check(found, not found.ndim)
        operation, types = OPERATIONS.get(name, (None, ()))
        if operation is None or [x.aval.dtype for x in operands] != [np.dtype(t) for t in types]:
            raise Unknown
        return operation(*map(self.words, operands))

    def _of_source(self, var: Variable) -> np.ndarray:
        known, self.source = self.source, var
        return _check(WORDS, not isinstance(var, Literal) and known in (None, var))


def _check(found: np.ndarray, holds: bool) -> np.ndarray:
    if not holds:
        raise Unknown
    return found


def _word(literal: Variable) -> np.ndarray:
    return _check(np.asarray(literal.val), literal.aval.dtype == np.int32).astype(np.int32).view(np.uint32)


def _shifted(dtype: type[np.integer[Any]]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """To the right; of signed words the sign is repeated."""

    def shifted(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        return (x.view(dtype) >> _check(by, not by.ndim and bool(by < 32)).astype(dtype)).view(np.uint32)

    return shifted


def _is_negative(x: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """If it is so for all words of a half, or for none."""
    negative = np.broadcast_to(x >> np.uint32(31), WORDS.shape)
    return _check(negative, not zero.any() and all(len(set(half.tolist())) == 1 for half in (negative[:HALF], negative[HALF:])))


def _selected(which: np.ndarray, on_false: np.ndarray, on_true: np.ndarray) -> np.ndarray:
    return np.where(which, on_true, on_false)


Operation = Callable[..., np.ndarray]
OPERATIONS: Mapping[str, tuple[Operation, tuple[type, ...]]] = {
    "lt": (_is_negative, (np.int32, np.int32)),
    "not": (np.invert, (np.int32,)),
    "select_n": (_selected, (np.bool_, np.int32, np.int32)),
    "shift_right_arithmetic": (_shifted(np.int32), (np.int32, np.int32)),
    "shift_right_logical": (_shifted(np.uint32), (np.int32, np.int32)),
    "xor": (np.bitwise_xor, (np.int32, np.int32)),
}
"""What operations do to words, and the types that they are of in a jaxpr."""
