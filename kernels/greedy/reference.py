"""Greedy tokens in plain torch."""

import torch
from torch import Tensor

from kernels.greedy import NAN_TOKEN


def greedy_tokens(logits: Tensor, wide: Tensor, wanted: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """Copy logits and return the largest one's token; see `kernels.greedy.greedy_tokens`."""
    wide.copy_(logits)
    best = wide.amax(dim=-1)
    # Finds the first of equal logits, which `max` does not guarantee.
    token_ids = (wide == best.unsqueeze(1)).to(torch.uint8).argmax(dim=-1)
    return token_ids.masked_fill(torch.isnan(best), NAN_TOKEN)
