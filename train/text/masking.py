"""BERT's pretraining examples: two pieces of text, of which the second follows the first or not, with words masked (Devlin et al., 2018).

As the original makes them (google-research/bert, create_pretraining_data): a document is a run of lines between blank ones, a line is a
sentence; pieces are as long as fits, now and then shorter; half of the second pieces come from another document; of all words 15 % are to
be guessed, of which 80 % are shown as [MASK], 10 % as another word and 10 % as themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.errors import DataError
from train.ranges import check_least, check_shares, underlined
from train.text.tokenizing import Tokenizer

Piece = list[int]
OTHER_DOCUMENT_SHARE = 0.5
MASKED_SHARE, KEPT_SHARE = 0.8, 0.1
IGNORED = -100
"""The label of a place that counts for nothing."""
SPECIAL_TOKENS = 3  # [CLS] and two [SEP]


@dataclass(frozen=True, slots=True)
class Masking:
    """How examples are made; the names and values are the original's."""

    max_seq_length: int = 128
    max_predictions_per_seq: int = 20
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    dupe_factor: int = 10
    random_seed: int = 12345

    def __post_init__(self) -> None:
        least = {"max_seq_length": SPECIAL_TOKENS + 2, "max_predictions_per_seq": 1, "dupe_factor": 1}
        check_least(self, least, underlined)
        check_shares(self, ("masked_lm_prob", "short_seq_prob"), underlined)


@dataclass(frozen=True, slots=True)
class _Special:
    """Numbers of the tokens that every example needs, and the size of the vocabulary."""

    cls: int
    sep: int
    mask: int
    size: int


def documents(lines: Sequence[str], tokenizer: Tokenizer) -> list[list[Piece]]:
    """The sentences of each document, as tokens; sentences and documents without a token are left out."""
    found: list[list[Piece]] = [[]]
    for line, tokens in zip(lines, tokenizer.encode_lines([line.strip() for line in lines], special=False), strict=True):
        if not line.strip():
            found.append([])
        elif len(tokens):
            found[-1].append(tokens.tolist())
    return [document for document in found if document]


def examples(lines: Sequence[str], tokenizer: Tokenizer, masking: Masking, name: str) -> dict[str, np.ndarray]:
    """Examples under the names that transformers' BERT takes, each int32 with a row an example, shuffled.

    input_ids, token_type_ids, attention_mask [N, T]; positions and labels of the masked words [N, P], label -100 where there are fewer than
    P; next_sentence_label [N]: 0 if the second piece follows the first, 1 if it does not.

    Raises:
      DataError: the text has fewer than two documents, or makes no example.
    """
    rng = np.random.default_rng(masking.random_seed)
    texts = documents(lines, tokenizer)
    if len(texts) < 2:
        raise DataError(f"{name}: {len(texts)} document; pretraining needs two or more: runs of lines with a blank line between them.")
    special = _Special(tokenizer.token("[CLS]"), tokenizer.token("[SEP]"), tokenizer.token("[MASK]"), len(tokenizer))
    pairs = [pair for _ in range(masking.dupe_factor) for number in range(len(texts)) for pair in _pairs(texts, number, masking, rng)]
    rows = [_example(*pair, special, masking, rng) for pair in pairs]
    order = rng.permutation(len(rows))
    return {key: np.stack([rows[i][key] for i in order]) for key in rows[0]}


def _pairs(texts: list[list[Piece]], number: int, masking: Masking, rng: np.random.Generator) -> list[tuple[Piece, Piece, bool]]:
    """(first piece, second piece, whether the second is from another document) of one document."""
    document, room = texts[number], masking.max_seq_length - SPECIAL_TOKENS
    wanted = _wanted(room, masking, rng)
    found, chunk, i = [], [], 0
    while i < len(document):
        chunk.append(document[i])
        if i == len(document) - 1 or sum(map(len, chunk)) >= wanted:
            cut = int(rng.integers(1, len(chunk))) if len(chunk) > 1 else 1
            first = _joined(chunk[:cut])
            other = len(chunk) == 1 or rng.random() < OTHER_DOCUMENT_SHARE
            second = _from_another(texts, number, wanted - len(first), rng) if other else _joined(chunk[cut:])
            i -= len(chunk) - cut if other else 0  # sentences that were not used begin the next pair
            found.append((*_fitted(first, second, room, rng), other))
            chunk = []
        i += 1
    return found


def _wanted(room: int, masking: Masking, rng: np.random.Generator) -> int:
    """Tokens of a pair: all that fit, or now and then fewer."""
    return int(rng.integers(2, room + 1)) if rng.random() < masking.short_seq_prob else room


def _from_another(texts: list[list[Piece]], number: int, wanted: int, rng: np.random.Generator) -> Piece:
    """Sentences of another document, from any of them on, until there are as many tokens as wanted (at least one sentence)."""
    other = int(rng.integers(0, len(texts) - 1))
    document = texts[other + (other >= number)]
    found: Piece = []
    for sentence in document[int(rng.integers(0, len(document))) :]:
        found += sentence
        if len(found) >= wanted:
            break
    return found


def _fitted(first: Piece, second: Piece, room: int, rng: np.random.Generator) -> tuple[Piece, Piece]:
    """Both, the longer one cut at its front or back, token by token, until they fit."""
    first, second = list(first), list(second)
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if rng.random() < 0.5 else -1)
    return first, second


def _example(
    first: Piece, second: Piece, other: bool, special: _Special, masking: Masking, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    words = [special.cls, *first, special.sep, *second, special.sep]
    places, labels, words = _masked(words, special, masking, rng)
    length, predictions = masking.max_seq_length, masking.max_predictions_per_seq
    return {
        "input_ids": _padded(words, length, 0),
        "token_type_ids": _padded([0] * (len(first) + 2) + [1] * (len(second) + 1), length, 0),
        "attention_mask": _padded([1] * len(words), length, 0),
        "masked_positions": _padded(places, predictions, 0),
        "masked_labels": _padded(labels, predictions, IGNORED),
        "next_sentence_label": np.array(other, np.int32),
    }


def _masked(words: Piece, special: _Special, masking: Masking, rng: np.random.Generator) -> tuple[list[int], list[int], Piece]:
    """(places of the words to be guessed, in order; those words; the words as shown)."""
    candidates = [i for i, word in enumerate(words) if word not in (special.cls, special.sep)]
    count = min(masking.max_predictions_per_seq, max(1, round(len(words) * masking.masked_lm_prob)))
    places = sorted(rng.permutation(candidates)[:count].tolist())
    labels, shown = [words[i] for i in places], list(words)
    for place, draw in zip(places, rng.random(len(places)), strict=True):
        if draw < MASKED_SHARE:
            shown[place] = special.mask
        elif draw >= MASKED_SHARE + KEPT_SHARE:
            shown[place] = int(rng.integers(0, special.size))
    return places, labels, shown


def _joined(sentences: Sequence[Piece]) -> Piece:
    return [token for sentence in sentences for token in sentence]


def _padded(values: Sequence[int], size: int, filler: int) -> np.ndarray:
    found = np.full(size, filler, np.int32)
    found[: len(values)] = values
    return found
