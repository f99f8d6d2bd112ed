"""Groups of sequences in a decode step that begin with the same keys."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Most groups per step. Each group may leave a block of queries partly empty.
MAX_GROUPS = 8


class PrefixGroup(NamedTuple):
    """Sequences that begin with the same pages of the KV cache.

    Attributes:
        members: `[num_members]` int64, the sequences' indices in the batch.
        length: number of tokens in these pages, fewer than any member has.
    """

    members: NDArray[np.int64]
    length: int
