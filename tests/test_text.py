"""Text for language models: tokenizers, blocks, masked pairs of sentences."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuflow.data import places
from tpuflow.errors import ConfigError, DataError
from train.text import clip
from train.text.blocks import LINES_A_GROUP, blocks, read_lines, split
from train.text.masking import Masking, examples
from train.text.tokenizing import Tokenizer, find_tokenizer, load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]


def word_pieces(folder: Path) -> Tokenizer:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return load_tokenizer(folder)


def characters() -> Tokenizer:
    """Every printable ASCII character and the line break is a token."""
    vocabulary = {chr(code): i for i, code in enumerate([10, *range(32, 127)])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(Path("characters"), inner)


def shared(name: str) -> Path:
    folder = next((place / name for place in places.data_dirs() if (place / name).is_dir()), None)
    if folder is None:
        pytest.skip(f"{name} is not in TPUFLOW_DATA")
    return folder


SENTENCES = [
    "Hello, world!", "  two  spaces\tand a tab\n", "naïve café, ÅNGSTRÖM", "北京 is 3,000 years old", "it's he'll don't", "😀 x_y-z 1e-5",
    "\n", "",
]  # fmt: skip


@pytest.mark.torch
def test_gpt2s_tokens_are_those_of_transformers(transformers: ModuleType, tmp_path: Path) -> None:
    folder = shared("gpt2-bpe")
    for theirs, ours in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (tmp_path / theirs).write_bytes((folder / ours).read_bytes())
    expected, found = transformers.GPT2Tokenizer.from_pretrained(tmp_path), find_tokenizer("gpt2-bpe")
    assert len(found) == 50257
    for text in [*SENTENCES, "a<|endoftext|>b"]:
        assert found.encode(text).tolist() == expected(text)["input_ids"]
        assert found.decode(found.encode(text)) == expected.decode(expected(text)["input_ids"], skip_special_tokens=True)
    (tmp_path / "saved").mkdir()
    found.save(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert all(again(text)["input_ids"] == found.encode(text).tolist() for text in SENTENCES)


@pytest.mark.torch
def test_clips_prompts_are_those_of_transformers(transformers: ModuleType, tmp_path: Path) -> None:
    shared("clip-bpe")
    found = find_tokenizer("clip-bpe")
    clip.save(found, tmp_path, 77)
    expected, again = transformers.CLIPTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert len(found) == 49408
    prompts = [*SENTENCES, "a photo of a cat's hat, 1999!", "a<|endoftext|>b <|startoftext|>", "e\u0301 É", "x" * 300 + " word" * 100]
    tokens = expected(prompts, max_length=77, padding="max_length", truncation=True)["input_ids"]
    with pytest.warns(UserWarning, match="are read: 'word .*word' is cut off"):
        np.testing.assert_array_equal(clip.encode_prompts(found, prompts, 77), tokens)
    np.testing.assert_array_equal(clip.encode_prompts(again, prompts[:-1], 77), tokens[:-1])
    assert found.decode(found.encode("A photo of a cat.")) == "a photo of a cat ."


@pytest.mark.torch
def test_berts_tokens_are_those_of_transformers(transformers: ModuleType) -> None:
    folder = shared("bert-vocab")
    expected, found = transformers.BertTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in SENTENCES:
        assert found.encode(text).tolist() == expected(text)["input_ids"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer .it holds: nothing.; expected one of: tokenizer.json; vocab.json with merges.txt"),
        ({"tokenizer.json": "{"}, "tokenizer.json: damaged"),
        ({"vocab.json": "{}"}, "no tokenizer .it holds: vocab.json."),
        ({"vocab.json": "[1]", "merges.txt": "#version\n"}, "damaged, or no tokenizer of this kind"),
    ],
)
def test_a_folder_without_a_sound_tokenizer_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_a_token_that_a_vocabulary_does_not_have_is_named() -> None:
    with pytest.raises(DataError, match=r"no token '\[MASK\]'"):
        characters().token("[MASK]")


@given(st.lists(st.text("abc \n", max_size=30), max_size=60), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_blocks_are_the_text_in_order_without_the_rest_of_each_group(texts: list[str], size: int) -> None:
    tokenizer = characters()
    lines = "".join(texts).splitlines(keepends=True) * 40
    groups = ["".join(lines[i : i + LINES_A_GROUP]) for i in range(0, len(lines), LINES_A_GROUP)]
    expected = "".join(group[: len(group) // size * size] for group in groups)
    if not expected:
        with pytest.raises(DataError, match=f"make no block of {size}"):
            blocks(lines, tokenizer, size, "text")
        return
    found = blocks(lines, tokenizer, size, "text")
    assert found.shape == (len(expected) // size, size)
    assert tokenizer.decode(found.reshape(-1)) == expected


def test_a_file_is_read_line_by_line_whatever_its_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\r\ntwo\x0b still two\u2028and still\rthree\n\nlast".encode())
    assert read_lines(path) == ["one\n", "two\x0b still two\u2028and still\n", "three\n", "\n", "last"]


def test_the_first_part_of_the_lines_is_held_out() -> None:
    lines = [str(i) for i in range(41)]
    assert split(lines, 5) == (lines[2:], lines[:2])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "No such file"),
        ("data.json", b"{}", "expected a text file, got a .json file"),
        ("latin1.txt", b"one\ntwo \xe9t\xe9\n", r"latin1.txt, line 2: byte 0xe9 at offset 8 is not UTF-8; .*iconv"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_lines(tmp_path / name)


WRITTEN = st.lists(st.lists(st.text("abcdefgh ", min_size=1, max_size=24), min_size=1, max_size=6), min_size=2, max_size=8)


@given(WRITTEN, st.integers(8, 40), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_masked_examples_are_two_pieces_that_can_be_put_together_again(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[str]], length: int, seed: int
) -> None:
    tokenizer = word_pieces(tmp_path_factory.mktemp("bert"))
    lines = [line for document in texts for line in (*document, "")]
    if sum(any(line.strip() for line in document) for document in texts) < 2:
        return
    masking = Masking(max_seq_length=length, max_predictions_per_seq=4, dupe_factor=2, random_seed=seed)
    found = examples(lines, tokenizer, masking, "text")
    words, kinds, shown = (found[name] for name in ("input_ids", "token_type_ids", "attention_mask"))
    assert words.shape == (len(words), length)
    whole = "".join(line.replace(" ", "") for line in lines)
    for row in range(len(words)):
        places, labels = found["masked_positions"][row], found["masked_labels"][row]
        counted = labels != -100
        assert 1 <= counted.sum() <= 4
        assert (np.diff(places[counted]) > 0).all()
        original = words[row].copy()
        original[places[counted]] = labels[counted]
        tokens = original[: shown[row].sum()]
        assert tokens[0] == tokenizer.token("[CLS]")
        (first, second) = np.flatnonzero(tokens == tokenizer.token("[SEP]"))
        assert second == len(tokens) - 1
        assert (kinds[row] == ((np.arange(length) > first) & (np.arange(length) <= second))).all()
        for piece in (tokens[1:first], tokens[first + 1 : second]):
            text = "".join(WORDS[token].removeprefix("##") for token in piece)
            assert len(piece)
            assert text in whole


def test_of_the_masked_words_most_are_hidden_and_some_are_others_or_themselves(tmp_path: Path) -> None:
    tokenizer = word_pieces(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["" if i % 9 == 0 else " ".join(rng.choice(list("abcdefgh"), 12)) for i in range(4000)]
    found = examples(lines, tokenizer, Masking(max_seq_length=64, dupe_factor=1), "text")
    counted = found["masked_labels"] != -100
    shown = np.take_along_axis(found["input_ids"], found["masked_positions"], axis=1)
    hidden, same = (shown == tokenizer.token("[MASK]"))[counted], (shown == found["masked_labels"])[counted]
    assert abs(hidden.mean() - 0.8) < 0.02
    assert abs(same.mean() - 0.1) < 0.02
    assert abs(counted.sum() / found["attention_mask"].sum() - 0.15) < 0.01
    assert 0.4 < found["next_sentence_label"].mean() < 0.7


@pytest.mark.parametrize(
    ("lines", "options", "error", "message"),
    [
        (["one document"], {}, DataError, "text: 1 document; pretraining needs two"),
        ([], {"max_seq_length": 4}, ConfigError, "--max_seq_length: expected 5 or more, got 4"),
        ([], {"masked_lm_prob": 1.5}, ConfigError, "--masked_lm_prob: expected 0 to 1, got 1.5"),
    ],
)
def test_what_makes_no_masked_examples_is_refused(tmp_path: Path, lines: list[str], options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        examples(lines, word_pieces(tmp_path), Masking(**options), "text")
