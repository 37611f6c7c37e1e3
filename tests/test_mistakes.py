"""Every error that a user is likely to cause: its whole text, and whether it says where, what was found, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes import MISTAKES
from tests.mistakes.document import document, section
from tests.mistakes.table import SCRIPT

DOCUMENT = Path(__file__).parents[1] / "docs" / "errors.md"
OURS = ("/tpuflow/", "site-packages", "lib/python", "unknown source line")
"""What no text may name: files of ours or of a library's, in place of the user's."""


@pytest.fixture(scope="module")
def written() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("title", MISTAKES)
def test_the_whole_text_of_an_error_is_the_documented_one(title: str, written: str) -> None:
    """If a text was changed on purpose: python -m tests.mistakes > docs/errors.md"""
    assert section(MISTAKES[title]) in written


@pytest.mark.parametrize("title", MISTAKES)
def test_an_error_says_where_it_is_what_was_found_and_what_to_do(title: str) -> None:
    mistake = MISTAKES[title]
    for part in (mistake.where, mistake.found, mistake.remedy):
        assert part and part in mistake.text
    assert not [name for name in OURS if name in mistake.text]
    if mistake.where.startswith(SCRIPT):
        number = int(mistake.where.partition(":")[2].partition(":")[0])
        assert 1 <= number <= len(mistake.code.splitlines())


def test_the_document_is_made_of_the_table(written: str) -> None:
    assert written == document()


def test_there_are_enough_mistakes_to_learn_from() -> None:
    assert len(MISTAKES) >= 70
