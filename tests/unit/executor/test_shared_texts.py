"""Which texts of a step share a prefix with another one, and how long it is."""

import numpy as np
import pytest

from runtime.step.shared_texts import shared_beginnings

QUERY = list(range(100, 140))


@pytest.mark.parametrize(
    ("texts", "lenders", "lengths"),
    [
        # Whole grains of the common prefix: 40 tokens are two of 16 and a rest.
        ([[*QUERY, 1, 2], [*QUERY, 3], [*QUERY, 1, 4]], [0, 0, 0], [0, 32, 32]),
        # At least one token is computed of a text that equals another one or its prefix.
        ([QUERY[:32], QUERY[:32], QUERY[:16]], [0, 0, 2], [0, 16, 0]),
        # The next request's texts have another prefix.
        ([[*QUERY, 1], [*QUERY, 2], [7] * 20, [*[7] * 16, 1]], [0, 0, 2, 2], [0, 32, 0, 16]),
        # Less than a grain is not shared.
        ([QUERY[:15], [*QUERY[:15], 1], [1]], [0, 1, 2], [0, 0, 0]),
        ([[5]], [0], [0]),
    ],
)
def test_shared_beginnings(texts, lenders, lengths):
    found = shared_beginnings([np.array(text, dtype=np.int32) for text in texts], 16)
    assert [each.tolist() for each in found] == [lenders, lengths]
