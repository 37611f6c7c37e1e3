"""CLIP's tokenizer: byte pairs of lower-case words, and prompts of one length for its text encoder."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tpuflow.errors import short

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
TOKENS: Mapping[str, str] = {"bos_token": BEGIN, "eos_token": END, "unk_token": END, "pad_token": END}
"""What a folder may call otherwise -> the original's tokens."""
MERGES = 48894
"""Of CLIP's own file, which has more."""
WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
"""What is a word: letters, a digit, or other signs in a row."""
LAST = "</w>"
"""The end of a token that ends a word."""


def from_files(tokenizers: ModuleType, vocab: Path, merges: Path) -> Any:
    """The tokenizer of vocab.json and merges.txt; the folder says whether tokens have other names."""
    names = special_tokens(vocab.parent)
    return _made(tokenizers, json.loads(vocab.read_text(encoding="utf-8")), _pairs(merges.read_text(encoding="utf-8")), names)


def from_openai(tokenizers: ModuleType, merges: Path) -> Any:
    """The tokenizer of OpenAI's own file, from which the vocabulary follows: bytes, bytes that end words, pairs, two special tokens."""
    with gzip.open(merges, "rt", encoding="utf-8") as stream:
        pairs = _pairs(stream.read())[:MERGES]
    letters = _letters()
    words = [*letters, *(letter + LAST for letter in letters), *("".join(pair) for pair in pairs), BEGIN, END]
    return _made(tokenizers, {word: number for number, word in enumerate(words)}, pairs, dict(TOKENS))


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, unk_token and pad_token as a tokenizer's folder has them: its newer files in tokenizer_config.json alone."""
    config = _json(folder / "tokenizer_config.json")
    given = config if "added_tokens_decoder" in config else {**config, **_json(folder / "special_tokens_map.json")}
    found = {name: given.get(name, default) for name, default in TOKENS.items()}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def encode_prompts(tokenizer: Any, prompts: Sequence[str], length: int) -> np.ndarray:
    """The tokens of prompts, cut and padded to one length: int32 [N, length].

    tokenizer: a `train.text.tokenizing.Tokenizer`. What does not fit is cut off before the last token, with a warning that says what.
    """
    padding = tokenizer.token(special_tokens(tokenizer.folder)["pad_token"])
    rows = np.full((len(prompts), length), padding, np.int32)
    for row, prompt, tokens in zip(rows, prompts, tokenizer.encode_lines(prompts), strict=True):
        if len(tokens) > length:
            lost = tokenizer.decode(tokens[length - 1 : -1])
            said = f"the prompt {short(prompt)} is {len(tokens)} tokens, of which {length} are read: {lost!r} is cut off"
            warnings.warn(said, stacklevel=2)
            tokens = np.append(tokens[: length - 1], tokens[-1])
        row[: len(tokens)] = tokens
    return rows


def save(tokenizer: Any, folder: Path, length: int) -> None:
    """Write it as transformers' CLIPTokenizer reads it, of whichever version; length: tokens of a prompt."""
    tokenizer.inner.model.save(str(folder))
    names = special_tokens(tokenizer.folder)
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length, "do_lower_case": True, **names}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _made(tokenizers: ModuleType, vocabulary: dict[str, int], pairs: list[tuple[str, str]], names: Mapping[str, str]) -> Any:
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=pairs, continuing_subword_prefix="", end_of_word_suffix=LAST, unk_token=names["unk_token"]
    )
    made = tokenizers.Tokenizer(model)
    normalizers, before, decoders = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()])
    made.pre_tokenizer = before.Sequence(
        [before.Split(tokenizers.Regex(WORDS), behavior="removed", invert=True), before.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(LAST, " "), decoders.Strip(" ", 0, 1)])
    made.add_special_tokens(list(dict.fromkeys(names.values())))
    around = [(names[which], made.token_to_id(names[which])) for which in ("eos_token", "bos_token")]
    made.post_processor = tokenizers.processors.RobertaProcessing(*around, trim_offsets=False, add_prefix_space=False)
    return made


def _pairs(text: str) -> list[tuple[str, str]]:
    """The merges of a file: a pair in each line, perhaps after one that says the version."""
    lines = text.split("\n")
    pairs = (line.split() for line in (lines[1:] if "#version:" in lines[0] else lines))
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _letters() -> list[str]:
    """A printable letter for each byte, in the vocabulary's order: those that are printable first, as GPT-2 has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
