"""Positions in the data, which checkpoints save, and how an iterable is moved to one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.errors import DataError, a_thing


@dataclass(frozen=True, slots=True)
class Position:
    """A position between two batches.

    `passes`: completed passes over the data; `batches`: batches done in the current pass; `steps`: batches done in all. `source`: a state
    that the data's `state_dict` (or its iterator's `get_state`) has returned, from which `behind` batches must be drawn to reach this
    position; None if the data have no state.
    """

    passes: int = 0
    batches: int = 0
    steps: int = 0
    source: Any = None
    behind: int = 0


START = Position()


class Source:
    """An iterable of batches, or a function that returns one, which is iterated over once in each pass.

    It can be moved to a position if it has `state_dict` and `load_state_dict`, or `seek(batches since the beginning)`, or if its iterator
    has `get_state` and `set_state`; its next iteration then gives the rest of the pass. Any other data are iterated over again.
    """

    def __init__(self, data: Any, make: Callable[[], Any], what: str = "data"):
        self._data, self._make, self._what = data, make, what
        self._iterator: Any = None
        self._wanted: Any = None

    @property
    def _keeps_state(self) -> bool:
        return hasattr(self._data, "state_dict") and hasattr(self._data, "load_state_dict")

    def open(self) -> Iterator[Any]:
        """The batches of a new pass, or after `move` the rest of one."""
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
        """The state before the next batch of the pass that was opened last; None if the data have none."""
        if self._keeps_state:
            return self._data.state_dict()
        return self._iterator.get_state() if hasattr(self._iterator, "get_state") else None

    def state_between_passes(self) -> Any:
        """The state before the next pass; None if the data have none."""
        return self._data.state_dict() if self._keeps_state else None

    def move(self, position: Position) -> int | None:
        """Move, so that the next `open` starts n batches before the position, and return n; None if the data cannot be moved.

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
    """Warn that data which cannot be moved are drawn again up to the position where the training continues."""
    warnings.warn(
        f"the data cannot be moved to a position, so their first {position.steps} batches are drawn again and thrown away; the training "
        "continues bit for bit only if they come as they did before. Data with state_dict and load_state_dict, or seek(batches), are "
        "moved at once.",
        RuntimeWarning,
        stacklevel=2,
    )
