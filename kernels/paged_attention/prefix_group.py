"""Sequences of a decode step that begin with the same keys."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Groups that a step may have: each may leave a block of queries part empty.
MAX_GROUPS = 8


class PrefixGroup(NamedTuple):
    """Sequences that begin with the same pages.

    Attributes:
        members: `[num_members]` int64, their places in the batch.
        length: tokens that lie in these pages, fewer than any member has.
    """

    members: NDArray[np.int64]
    length: int
