"""Text files as blocks of tokens, cut as transformers' language-modelling examples cut them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tpuflow.errors import DataError
from train.text.tokenizing import Tokenizer

LINES_A_GROUP = 1000
"""Lines whose tokens are joined and cut together; what makes no whole block at a group's end is dropped, as the examples do by default."""

NOT_TEXT = {".csv", ".json", ".jsonl", ".parquet", ".gz", ".zip"}


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, each with its line break.

    Raises:
      DataError: it cannot be read, is no text file, or holds bytes that are not UTF-8.
    """
    if path.suffix in NOT_TEXT:
        raise DataError(f"{path}: expected a text file, got a {path.suffix} file; write its texts into one .txt file, one a line.")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a text file.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8; convert the file, for example with "
            f"iconv -f latin1 -t utf-8."
        ) from error
    return io.StringIO(text, newline=None).readlines()


def split(lines: Sequence[str], percent: float) -> tuple[Sequence[str], Sequence[str]]:
    """(lines for training, lines for validation): validation gets the first `percent` of them."""
    bound = round(len(lines) * percent / 100)
    return lines[bound:], lines[:bound]


def blocks(lines: Sequence[str], tokenizer: Tokenizer, block_size: int, name: str) -> np.ndarray:
    """Tokens int32 [N, block_size]: each line by itself becomes tokens, LINES_A_GROUP lines are joined and cut.

    Raises:
      DataError: there are too few for one block.
    """
    tokens = tokenizer.encode_lines(lines)
    groups = (tokens[i : i + LINES_A_GROUP] for i in range(0, len(tokens), LINES_A_GROUP))
    cut = [_whole(np.concatenate(group), block_size) for group in groups]
    found = np.concatenate(cut) if cut else np.empty((0, block_size), np.int32)
    if not len(found):
        total = sum(map(len, tokens))
        raise DataError(
            f"{name}: {total} tokens in {len(lines)} lines make no block of {block_size}; give more text, or a smaller --block_size."
        )
    return found


def _whole(tokens: np.ndarray, size: int) -> np.ndarray:
    """[T] -> [T // size, size]; the rest is dropped."""
    return tokens[: len(tokens) // size * size].reshape(-1, size)
