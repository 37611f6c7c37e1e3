"""The processes of a computation under `jax.distributed`: joining them, exchanging data with them, and errors when one is lost.

Communication is JAX's own: its coordination service, and collectives over gloo. Without `jax.distributed` there is one process, and nothing
is sent.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpuflow.errors import ConfigError, PeerError, TpuflowError
from tpuflow.jaxprs.compat import as_keys, is_key

_LOST = re.compile(r"gloo|connection (closed|reset)|socket closed|broken pipe|coordination ?service|heartbeat", re.IGNORECASE)
"""Matches the text of XLA's ValueErrors and RuntimeErrors that mean that a process does not respond."""
_LATE = re.compile(r"timed out waiting", re.IGNORECASE)
"""What is in it when a process has answered no collective for as long as XLA waits (`--xla_cpu_collective_timeout_seconds`)."""


COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The environment that says where process 0 listens (host:port), how many processes there are, and which one this is."""


def join(*, asked: bool = False) -> None:
    """Join the other processes of a computation: those of the environment, or if `asked`, those that JAX finds by itself (Slurm, MPI, ...).
    To be called before anything else of JAX. Without either there is one process.

    Raises:
      ConfigError: the environment is incomplete, or nothing is found.
    """
    given = {name: os.environ[name] for name in (COORDINATOR, PROCESSES, PROCESS) if os.environ.get(name)}
    if not given and not asked:
        return
    try:
        jax.distributed.initialize(given.get(COORDINATOR), _number(given, PROCESSES), _number(given, PROCESS))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"several processes: {_first_line(error)} Found {given or 'nothing'} in the environment; expected {COORDINATOR}=host:port of "
            f"process 0, {PROCESSES}, and {PROCESS} from 0 on, or a cluster that jax.distributed.initialize knows."
        ) from error


def _number(given: Mapping[str, str], name: str) -> int | None:
    try:
        return int(given[name]) if name in given else None
    except ValueError:
        raise ConfigError(f"{name}: expected a number, got {given[name]!r}.") from None


def leave(status: int) -> None:
    """End a process that has failed at once, if there are others: an ordinary exit would wait for them, while they wait for this one."""
    if status and count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def number() -> int:
    """Which one this is, from 0 on."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this is the one that writes files and speaks to the user for all of them."""
    return number() == 0


def devices() -> tuple[Any, ...]:
    """One device of each process, in their order: the first of its own."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda d: d.id):
        first.setdefault(device.process_index, device)
    return tuple(first[n] for n in sorted(first))


def everyones(own: np.ndarray) -> np.ndarray:
    """All-gather over the processes: [...] -> [processes, ...]. Types have at most 32 bits, and all processes must call it together.

    Raises:
      PeerError: one of them is gone.
    """
    with peers():
        return np.asarray(multihost_utils.process_allgather(own)).reshape(count(), *own.shape)


def check_alike(what: str, own: bytes, advice: str) -> None:
    """Check that bytes are equal in all processes, which must call it together. what, advice: for the message.

    Raises:
      ConfigError: they differ; the message names the processes that differ from the first.
    """
    if count() == 1:
        return
    found = everyones(np.frombuffer(own, np.uint8))
    others = [n for n, theirs in enumerate(found) if (theirs != found[0]).any()]
    if others:
        raise ConfigError(
            f"{what} of process {', '.join(map(str, others))} differ{'s' if len(others) == 1 else ''} from that of process 0, among "
            f"{count()}; all processes must run the same. {advice}"
        )


def by_first(action: Callable[[], object], failed: Exception) -> None:
    """Run an action in the first process, while the others wait; if it fails, they raise `failed`. All processes must call it together.

    Raises:
      PeerError: one of them is gone.
    """
    problem = None
    if is_first():
        try:
            action()
        except TpuflowError as error:
            problem = error
    went_wrong = count() > 1 and bool(everyones(np.array(problem is not None))[0])
    if problem is not None:
        raise problem
    if went_wrong:
        raise failed


def values(x: Any) -> np.ndarray:
    """A whole array as NumPy's; shards of other processes are gathered, in which case all processes must call it together."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    with peers():
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def local(tree: Any) -> Any:
    """A tree of arrays, in which those sharded over several processes are gathered to this process. It may contain random keys."""
    return jax.tree.map(_local, tree) if count() > 1 else tree


def _local(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if is_key(leaf):
        return as_keys(_local(jax.random.key_data(leaf)), leaf.aval)
    return jax.numpy.asarray(values(leaf))


@contextmanager
def peers() -> Iterator[None]:
    """Within the block, XLA's errors about a lost process become `PeerError`s.

    Raises:
      PeerError: a process of the computation does not answer any more.
    """
    try:
        yield
    except PeerError:
        raise
    except (ValueError, RuntimeError) as error:
        if count() == 1 or not _LOST.search(str(error)):
            raise
        fate = "stands still, or is cut off" if _LATE.search(str(error)) else "is gone"
        raise PeerError(
            f"process {number()} of {count()}: another process of this computation {fate} ({_first_line(error)}). Its chips "
            "are lost, and what was computed since the last checkpoint: see that process's own output for why, end what is left of it, then"
            " start all of them again, or fewer. A training goes on from its last checkpoint with resume=, on this mesh or another."
        ) from error


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
