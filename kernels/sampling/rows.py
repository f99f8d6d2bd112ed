"""The sampling parameters of a step, one tensor row per request."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of the `batch` rows of a step, with summaries from the caller.

    The Python values let the op skip work without reading the tensors. They may overstate
    (`any_top_k` without a row that uses it only costs time), but never understate.

    Attributes:
        temperature: `[batch]` float32; 0 means greedy.
        top_k: `[batch]` int32; -1, 0 or at least `vocab_size` mean off.
        top_p: `[batch]` float32; 1 or more means off, 0 or less keeps only the top token.
        min_p: `[batch]` float32 in `[0, 1]`; 0 means off.
        seed: `[batch]` int64.
        position: `[batch]` int64, index in its sequence of the token being sampled.
        all_greedy: every temperature is 0.
        any_top_k: a sampled row has top-k on.
        any_top_p: a sampled row has top-p on.
        max_top_k: the largest `top_k` that is on, 0 if there is none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    max_top_k: int
