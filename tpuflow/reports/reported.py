"""`Reported`: the base class of everything with a modelled cost, such as estimates, compiled functions and results of trainings."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable

from tpuflow.reports.page import Numbers, write_page
from tpuflow.reports.profile import Profile
from tpuflow.reports.trace import ROUND_TRIPS, write_trace


class Reported(ABC):
    """An object with a `profile`, which can be written as a Chrome trace and as an HTML page."""

    __slots__ = ()

    @abstractmethod
    def profile(self) -> Profile:
        """Tables of layers, kernels and queues, and the memory's timeline; printed by `str`, written by `to_json`."""

    def trace(self, path: str | os.PathLike[str], round_trips: int = ROUND_TRIPS) -> None:
        """Write so many launches as a Chrome trace (JSON), for ui.perfetto.dev or chrome://tracing.

        Raises:
          ConfigError: the file cannot be written.
        """
        write_trace(self.profile(), path, round_trips)

    def html(self, path: str | os.PathLike[str], numerics: Numbers | Iterable[Numbers] = ()) -> None:
        """Write one self-contained HTML page; `numerics`: a `tpuflow.NumericsReport`, or several, to show with it.

        Raises:
          ConfigError: the file cannot be written.
        """
        write_page(self.profile(), path, numerics)
