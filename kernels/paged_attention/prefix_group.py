"""Sequences of a decode step that begin with the same keys."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Maximum groups per step: each may leave a block of queries partly empty.
MAX_GROUPS = 8


class PrefixGroup(NamedTuple):
    """Sequences that begin with the same pages.

    Attributes:
        members: `[num_members]` int64, their indices in the batch.
        length: tokens in these pages, fewer than any member has.
    """

    members: NDArray[np.int64]
    length: int
