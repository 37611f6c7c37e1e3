"""Errors of the user's own code while it is traced: each names the user's line, and what to use where Python asks for values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from tpuflow.errors import TpuflowError
from tpuflow.jaxprs.compat import UserLine, user_line

NO_VALUES = "a step is compiled before there are values"
_VALUES_ASKED = (
    (
        jax.errors.TracerBoolConversionError,
        f"Python's if, while, assert, and, or, not ask for a value, but {NO_VALUES}. Use jnp.where(condition, a, b) to choose between "
        "values, jax.lax.cond for branches, jax.lax.while_loop for loops, & | ~ for conditions.",
    ),
    (
        jax.errors.TracerArrayConversionError,
        f"NumPy asks for values, but {NO_VALUES}. Use the function of jax.numpy with the same name.",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        f"Python's lists and range ask for a value, but {NO_VALUES}. Use jnp.take (or x[i] of an array) to choose, jax.lax.fori_loop to "
        "repeat.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        f"The shape of the result depends on values, but {NO_VALUES}. Keep the shape: jnp.where(mask, x, 0), or weights that are 0 for "
        "what does not count.",
    ),
    (
        jax.errors.ConcretizationTypeError,
        f"float(), int(), .item() and shapes ask for a value, but {NO_VALUES}. Keep numbers arrays, x.astype(jnp.float32), and give "
        "functions whose result has as many elements as values say a size=.",
    ),
)
"""What JAX raises where Python asks for values that are not there yet, the special before the general; and what to use instead."""


@contextmanager
def users_code(
    note: str, misfits: tuple[type[Exception], ...] = (), refusal: Callable[[str], TpuflowError] | None = None
) -> Iterator[None]:
    """Around the tracing of code that is not ours.

    What Python needs values for keeps its type and says at which line and what to use instead. `misfits` become what `refusal` makes of
    their text. Any other error gets the note.

    Raises:
      TpuflowError: the code raised one of `misfits`.
    """
    try:
        yield
    except TpuflowError:
        raise
    except Exception as error:
        line = user_line(error)
        remedy = next((text for kind, text in _VALUES_ASKED if isinstance(error, kind)), None)
        if remedy is not None:
            error.args = (_without_our_lines(str(error), line, remedy),)
        elif refusal is not None and isinstance(error, misfits):
            raise refusal(f"{_sentence(error)}{f' It comes from {line}.' if line else ''}") from error
        else:
            error.add_note(note)
            if line is not None:
                error.add_note(f"in {line}")
        raise


def _without_our_lines(text: str, line: UserLine | None, remedy: str) -> str:
    """JAX's text with the line that asked for a value in place of the line where tracing began, which may be ours."""
    said = " ".join(text.split("The error occurred while tracing")[0].split("See https")[0].split())
    link = re.search(r"See https://\S+", text)
    where = f" in {line}" if line else ""
    return f"{said.rstrip('.')}{where}. {remedy}{f' {link[0]}' if link else ''}"


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}."
