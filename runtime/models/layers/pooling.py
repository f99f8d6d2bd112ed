"""From the tokens' vectors to one vector a text."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.checkpoint.pooling_config import Mode
from runtime.models.encoder_batch import EncoderBatch


def pool(hidden: Tensor, batch: EncoderBatch, mode: Mode) -> Tensor:
    """Make one vector of each text.

    Args:
        hidden: `[num_tokens, hidden_size]`, of all of the batch's tokens.
        batch: whose texts they are.
        mode: how.

    Returns:
        `[num_texts, hidden_size]` float32.
    """
    starts, ends = batch.indptr[:-1], batch.indptr[1:]
    skipped = batch.prompt_lens
    if mode == "cls":
        if skipped is not None:
            starts = torch.minimum(starts + starts.new_tensor(skipped), ends - 1)
        return hidden.index_select(0, starts).float()
    if mode == "last":
        return hidden.index_select(0, ends - 1).float()
    # Text by text, so that a text's sum does not depend on its neighbours.
    parts = hidden.float().split(list(batch.lengths))
    if skipped is not None:
        # One that was cut within its prompt has its last token.
        parts = tuple(
            part[min(skip, len(part) - 1) :] for part, skip in zip(parts, skipped, strict=True)
        )
    return torch.stack([part.mean(dim=0) for part in parts])
