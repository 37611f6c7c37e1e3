"""Programs with one field changed: every integer, word or flag of a Program's records is a place to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import DType
from tpuflow.isa.instruction import QUEUES, Instruction
from tpuflow.isa.program import Constant, Port, Program

Path = tuple[Any, ...]
SKIPPED = (Chip, DType, Constant, Port, str, bytes)
DEBUG_FIELDS = ("name", "sources", "buffer_names", "inputs", "outputs", "infeeds", "outfeeds")


def places(node: Any, path: Path = ()) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """(path, words it may hold, empty for a number) of every changeable field below `node`."""
    if dataclasses.is_dataclass(node):
        for field in (f for f in dataclasses.fields(node) if f.init):
            here = (*path, field.name)
            value = getattr(node, field.name)
            kind = field.metadata.get("kind")
            if field.name in DEBUG_FIELDS and not isinstance(node, Instruction):
                continue
            if kind is not None and kind.choices:
                yield here, tuple(kind.choices)
            elif not isinstance(value, SKIPPED):
                yield from places(value, here)
    elif isinstance(node, tuple):
        for i, value in enumerate(node):
            if not isinstance(value, SKIPPED):
                yield from places(value, (*path, i))
    elif isinstance(node, int):
        yield path, ()


def get(node: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        node = node[key] if isinstance(key, int) else getattr(node, key)
    return node


def put(node: Any, path: Path, value: Any) -> Any:
    """`node` with the value at a path replaced."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        return (*node[:key], put(node[key], rest, value), *node[key + 1 :])
    return dataclasses.replace(node, **{key: put(getattr(node, key), rest, value)})


def mutate(program: Program, rng: np.random.Generator, *, only: type | None = None) -> tuple[Program, str]:
    """(the Program with one field changed, what was changed)."""
    found = list(places(program))
    while True:
        path, words = found[rng.integers(len(found))]
        old = get(program, path)
        new = _other_word(old, words, rng) if words else _other_number(old, rng)
        if new != old and (words or not isinstance(new, int) or -(2**31) <= new < 2**31):
            return put(program, path, new), f"{'.'.join(map(str, path))}: {old} -> {new}"


def _other_word(old: str, words: tuple[str, ...], rng: np.random.Generator) -> str:
    return words[rng.integers(len(words))] if old not in QUEUES else QUEUES[rng.integers(len(QUEUES))]


def _other_number(old: Any, rng: np.random.Generator) -> Any:
    if isinstance(old, bool):
        return not old
    choices = (old + 1, old - 1, old * 2, old // 2, 0, 1, old + 4, old + 128, old + 512, old + 4096)
    return choices[rng.integers(len(choices))]
