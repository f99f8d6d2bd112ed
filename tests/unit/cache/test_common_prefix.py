"""The common prefix of a prompt and the most similar cached one, to the token."""

import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.cache.radix_tree import RadixTree

PAGE = 4
# Few different tokens, so that sequences have much in common.
SEQUENCES = st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=6)


def grown(sequences: list[list[int]]) -> RadixTree:
    tree = RadixTree(PAGE)
    for number, sequence in enumerate(sequences):
        whole = np.array(sequence[: len(sequence) // PAGE * PAGE], dtype=np.int32)
        pages = np.arange(len(whole) // PAGE, dtype=np.int32) + 100 * number
        tree.insert(whole, pages, "ours")
    return tree


@given(SEQUENCES, st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_it_is_the_longest_of_all(sequences: list[list[int]], asked: list[int]) -> None:
    tree = grown(sequences)
    found = tree.common_prefix(np.array(asked, dtype=np.int32), "ours")
    kept = [each[: len(each) // PAGE * PAGE] for each in sequences]
    shared = [os.path.commonprefix([each, asked]) for each in kept]  # noqa: RUF071 lists, not paths
    longest = max(map(len, shared), default=0)
    assert found.num_tokens == longest
    goes_on = any(
        len(each) > longest and len(same) == longest
        for each, same in zip(kept, shared, strict=True)
    )
    assert found.differs == (goes_on and longest < len(asked))


def test_what_is_asked_about_is_not_used() -> None:
    tree = grown([[0] * 8, [1] * 8])
    num_pages = tree.num_pages
    # Inside of a page: a match would split there.
    assert tree.common_prefix(np.zeros(6, dtype=np.int32), "ours").num_tokens == 6
    assert tree.num_pages == num_pages
    # The oldest goes first, as if nothing had been asked.
    assert tree.evict(2).tolist() == [0, 1]


def test_other_name_spaces_are_not_looked_at() -> None:
    tree = grown([[1] * 8])
    asked = np.ones(8, dtype=np.int32)
    assert tree.common_prefix(asked, "ours").num_tokens == 8
    assert tree.common_prefix(asked, "theirs").num_tokens == 0
