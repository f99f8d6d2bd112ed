"""Hypothesis strategies for texts and token ids that are difficult for detokenizers."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

# Scripts whose characters have several tokens, joined and combining characters, and both writing
# directions.
SNIPPETS = [
    "hello ",
    " world",
    "the quick",
    "  ",
    "\n\n",
    "日本語",
    "東",
    "한국",
    "Привет",
    "مرحبا",
    "שלום",
    "e\u0301",
    "n\u0303o",
    "\u200f",
    "👨‍👩‍👧‍👦",
    "🇫🇷",
    "😀",
    "👍🏽",
    "x\ufe0f",
    "STOP",
    "ST",
    "Human:",
    "<think>",
    "<|im_end|>",
    "isn't it ?",
    " .",
    " ' ",
    "\ufffd",
    "\0",
    "\U0010ffff",
]

texts = st.lists(
    st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)), min_size=1, max_size=8
).map("".join)


def id_lists(vocab_size: int, special_ids: list[int]) -> st.SearchStrategy[list[int]]:
    """Draw lists of any token ids: unknown ids, special tokens, incomplete byte tokens."""
    return st.lists(
        st.one_of(
            st.integers(0, vocab_size - 1),
            st.sampled_from(special_ids),
            st.integers(-3, vocab_size + 3),
        ),
        max_size=24,
    )


def splits(data: Any, items: list[int]) -> list[list[int]]:
    """Draw a division of `items` into steps, some of them empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=len(items) + 1)))
    bounds = [0, *cuts, len(items)]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds)]
