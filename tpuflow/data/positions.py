"""Where a walk over the data stands, and how an iterable gets there again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.errors import DataError, a_thing


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two batches.

    `passes`: passes over the data that are over; `batches`: batches of the next pass that are done; `steps`: batches done altogether.
    `source`: what the data's own `state_dict` (or its iterator's `get_state`) was `behind` batches before this place; None if they
    have none.
    """

    passes: int = 0
    batches: int = 0
    steps: int = 0
    source: Any = None
    behind: int = 0


START = Position()


class Source:
    """An iterable of batches, or a function that makes one, that is walked over once in each pass.

    A data object with `state_dict` and `load_state_dict` (or `seek`, which takes a number of batches since the beginning), or whose
    iterator has `get_state` and `set_state`, is moved; any other is walked over again. A moved object's next iteration gives the rest of
    the pass.
    """

    def __init__(self, data: Any, make: Callable[[], Any], what: str = "data"):
        self._data, self._make, self._what = data, make, what
        self._iterator: Any = None
        self._wanted: Any = None

    @property
    def _keeps_state(self) -> bool:
        return hasattr(self._data, "state_dict") and hasattr(self._data, "load_state_dict")

    def open(self) -> Iterator[Any]:
        """A new pass, or the rest of one after a move."""
        made = self._make()
        if not isinstance(made, Iterable):
            raise DataError(
                f"{self._what}: the function gave {a_thing(made)}, expected an iterable of batches; return one, or yield batches."
            )
        self._iterator = iter(made)
        if self._wanted is not None:
            self._iterator.set_state(self._wanted)
            self._wanted = None
        return self._iterator

    def state(self) -> Any:
        """What describes the next batch of the pass that was opened last; None if nothing does."""
        if self._keeps_state:
            return self._data.state_dict()
        return self._iterator.get_state() if hasattr(self._iterator, "get_state") else None

    def state_between_passes(self) -> Any:
        """What describes the first batch of the next pass; None if every pass begins alike."""
        return self._data.state_dict() if self._keeps_state else None

    def move(self, position: Position) -> int | None:
        """Have the next `open` give what comes `n` batches before the position, and return n; None if that is not possible.

        Raises:
          ConfigError: the data say that the position was saved for others.
        """
        if position.source is not None and self._keeps_state:
            self._data.load_state_dict(position.source)
            return position.behind
        if hasattr(self._iterator, "set_state") and (position.source is not None or not position.batches):
            self._wanted = position.source
            return position.behind
        if hasattr(self._data, "seek"):
            self._data.seek(position.steps)
            return 0
        # A list gives the same batches in every pass.
        return position.batches if isinstance(self._data, (Sequence, Mapping)) else None


def skip(batches: Iterator[Any], count: int) -> None:
    """Draw `count` batches and forget them.

    Raises:
      DataError: there are fewer, so these are not the data that the position was saved for.
    """
    for i in range(count):
        if next(batches, None) is None:
            raise DataError(f"data: the training stopped after batch {count} of its pass, but the data now end after {i} batches.")


def say_fast_forward(position: Position) -> None:
    """That data without a position are drawn again up to the place where the training goes on."""
    warnings.warn(
        f"the data cannot be moved to a position, so their first {position.steps} batches are drawn again and thrown away; the training "
        "continues bit for bit only if they come as they did before. Data with state_dict and load_state_dict, or seek(batches), are "
        "moved at once.",
        RuntimeWarning,
        stacklevel=2,
    )
