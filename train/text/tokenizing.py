"""Tokenizers out of a model's folder, as the `tokenizers` library runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tpuflow.data import places
from tpuflow.errors import ConfigError, DataError
from train.text import clip

AT_ONCE = 4096
"""Lines that are tokenised together, which bounds the memory of it."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer and where it came from; `max_length`: tokens that its model takes, None if its folder does not say."""

    folder: Path
    inner: Any
    max_length: int | None = None

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones too."""
        return self.inner.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, special ones as the tokenizer adds them: int32 [T]."""
        return np.asarray(self.inner.encode(text).ids, np.int32)

    def encode_lines(self, lines: Sequence[str], *, special: bool = True) -> list[np.ndarray]:
        """The tokens of each line by itself: int32 [T] each."""
        parts = (lines[i : i + AT_ONCE] for i in range(0, len(lines), AT_ONCE))
        return [np.asarray(one.ids, np.int32) for part in parts for one in self.inner.encode_batch(part, add_special_tokens=special)]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, special ones left out."""
        return self.inner.decode([int(token) for token in tokens])

    def token(self, text: str) -> int:
        """The number of one token, such as "[MASK]".

        Raises:
          DataError: the vocabulary does not have it.
        """
        found = self.inner.token_to_id(text)
        if found is None:
            raise DataError(f"{self.folder}: the vocabulary has no token {text!r}, which this training needs.")
        return found

    def save(self, folder: Path) -> None:
        """Write it as transformers and `load_tokenizer` read it: tokenizer.json, tokenizer_config.json."""
        self.inner.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        limit = {} if self.max_length is None else {"model_max_length": self.max_length}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | limit, indent=2) + "\n")


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a folder: tokenizer.json, vocab.json with merges.txt (OpenAI's encoder.json, vocab.bpe, or CLIP's), or vocab.txt.

    Raises:
      DataError: there is none, or its files are damaged.
      ConfigError: the package tokenizers is missing.
    """
    folder, tokenizers = Path(folder), _library()
    for files, read in READERS.items():
        paths = [folder / name for name in files]
        if all(path.is_file() for path in paths):
            try:
                return Tokenizer(folder, read(tokenizers, *paths), _max_length(folder))
            except Exception as error:  # the library raises bare Exceptions of its own
                raise DataError(f"{', '.join(map(str, paths))}: damaged, or no tokenizer of this kind ({error}).") from error
    expected = "; ".join(" with ".join(files) for files in READERS)
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise DataError(
        f"{folder}: no tokenizer (it holds: {found or 'nothing'}); expected one of: {expected}. Put the model's tokenizer there, or name a "
        "folder that has one with --tokenizer_name."
    )


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a folder, or of a folder of that name under the data folders, such as `gpt2-bpe`."""
    found = next((place / name for place in (Path(), *places.data_dirs()) if (place / name).is_dir()), Path(name))
    return load_tokenizer(found)


def train_tokenizer(lines: Sequence[str], size: int) -> Tokenizer:
    """A new tokenizer of GPT-2's kind with `size` tokens, <|endoftext|> among them, of the pairs that are most frequent in the lines."""
    tokenizers = _library()
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(lines, vocab_size=size, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False)
    return Tokenizer(Path(), made._tokenizer)


def _byte_level(tokenizers: ModuleType, vocab: Path, merges: Path) -> Any:
    """GPT-2's: pairs of bytes, nothing normalised, nothing added."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def _byte_pairs(tokenizers: ModuleType, vocab: Path, merges: Path) -> Any:
    """CLIP's if the folder says so, else GPT-2's."""
    kind = str(_settings(vocab.parent).get("tokenizer_class", ""))
    return (clip.from_files if kind.startswith("CLIP") else _byte_level)(tokenizers, vocab, merges)


def _word_pieces(tokenizers: ModuleType, vocab: Path) -> Any:
    """BERT's uncased: lower case, accents away, [CLS] before and [SEP] after each part."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece.from_file(str(vocab), unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=_lower_case(vocab.parent))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    around = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    return made


READERS: Mapping[tuple[str, ...], Callable[..., Any]] = {
    ("tokenizer.json",): lambda tokenizers, path: tokenizers.Tokenizer.from_file(str(path)),
    ("vocab.json", "merges.txt"): _byte_pairs,
    ("encoder.json", "vocab.bpe"): _byte_level,
    ("bpe_simple_vocab_16e6.txt.gz",): clip.from_openai,
    ("vocab.txt",): _word_pieces,
}
"""The files of a tokenizer, most telling first, and how they are read."""


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _lower_case(folder: Path) -> bool:
    return bool(_settings(folder).get("do_lower_case", True))


def _max_length(folder: Path) -> int | None:
    """transformers writes 1e30 where there is no limit."""
    limit = _settings(folder).get("model_max_length")
    return int(limit) if isinstance(limit, (int, float)) and limit < 1e9 else None


def _library() -> ModuleType:
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors  # noqa: F401  submodules are attributes then
    except ImportError as error:
        raise ConfigError("text needs the package tokenizers: pip install 'tpuflow[text]'") from error
    return tokenizers
