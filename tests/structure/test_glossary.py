"""The glossary names files and words that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=\n- \*\*|\n\n|\Z)", TEXT, re.MULTILINE | re.DOTALL)
OURS = re.findall(r"^\| `(\w+)` \| .+? \| `(.+?)` \|$", TEXT, re.MULTILINE)


def test_there_are_entries() -> None:
    assert len(ENTRIES) == TEXT.count("\n- **") > 40
    assert len(OURS) == TEXT.count("\n| `") > 5


@pytest.mark.parametrize(("word", "text"), ENTRIES, ids=[word for word, _ in ENTRIES])
def test_an_entry_ends_with_the_file_where_it_lives(word: str, text: str) -> None:
    found = re.search(r"`([\w/]+\.py)`$", text.strip())
    assert found is not None, word
    assert (ROOT / found[1]).is_file(), found[1]


@pytest.mark.parametrize(("name", "path"), OURS, ids=[name for name, _ in OURS])
def test_a_word_of_ours_is_in_its_file(name: str, path: str) -> None:
    assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{name} is not in {path} any more"


def test_words_of_a_section_are_in_order() -> None:
    for section in TEXT.split("\n## ")[1:]:
        words = re.findall(r"^- \*\*(.+?)\*\*", section, re.MULTILINE)
        assert words == sorted(words, key=str.lower)
