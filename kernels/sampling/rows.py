"""The sampling parameters of a step; each tensor has one entry per request."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a step's rows, with summaries that the caller computes.

    The summaries are Python values, with which an op can skip work without reading tensors. A
    summary may be true without need: `any_top_k` without a row that uses top-k only costs time. It
    must never be false if a row needs the work.

    Attributes:
        temperature: `[batch]` float32; 0 means greedy.
        top_k: `[batch]` int32; -1, 0 and numbers from `vocab_size` on mean off.
        top_p: `[batch]` float32; 1 or more means off, 0 or less keeps only the most probable token.
        min_p: `[batch]` float32 in `[0, 1]`; 0 means off.
        seed: `[batch]` int64.
        position: `[batch]` int64, index in its sequence of the token that is sampled.
        all_greedy: whether every temperature is 0.
        any_top_k: whether a row with a temperature uses top-k.
        any_top_p: whether a row with a temperature uses top-p.
        max_top_k: the largest `top_k` that is not off; 0 if there is none.
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
