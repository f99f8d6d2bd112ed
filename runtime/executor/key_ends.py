"""How many keys each token of a step sees, where an image's see one another in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.executor.step_plan import Int32Array, StepPlan


def key_ends(plan: StepPlan, known: NDArray[np.intp], indptr: NDArray[Any]) -> Int32Array:
    """Return `[num_tokens]`, see `ForwardBatch.key_ends`.

    Args:
        plan: the step; of an image that it computes it has all tokens up to the last.
        known: place in the step of each of `plan.chunk_tokens`.
        indptr: `[num_seqs + 1]`, bounds of each sequence's tokens.
    """
    ahead = np.repeat(plan.start_lens - indptr[:-1], plan.query_lens)
    ends = (np.arange(1, plan.num_tokens + 1) + ahead).astype(np.int32)
    for span in plan.image_spans:
        places = known[span.first : span.first + span.length]
        ends[places] = ends[places[-1]]
    return ends
