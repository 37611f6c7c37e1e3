"""What threads that ask for it at once are given."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tpuflow.once import once


def test_threads_that_ask_at_once_get_the_same():
    at_once = threading.Barrier(8)

    @once
    def made() -> object:
        time.sleep(0.05)
        return object()

    def ask(_: int) -> object:
        at_once.wait()
        return made()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


def test_what_failed_is_tried_again():
    tries: list[int] = []

    @once
    def made() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError
        return len(tries)

    with pytest.raises(ValueError):
        made()
    assert made() == made() == 2
