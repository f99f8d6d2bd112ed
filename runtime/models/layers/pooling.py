"""From the tokens' vectors to one vector a text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from runtime.checkpoint.pooling_config import Pooling
from runtime.models.encoder_batch import EncoderBatch


def pool(hidden: Tensor, batch: EncoderBatch, pooling: Pooling) -> Tensor:
    """Make one vector of each text.

    Args:
        hidden: `[num_tokens, hidden_size]`, of all of the batch's tokens.
        batch: whose texts they are.
        pooling: how.

    Returns:
        `[num_texts, hidden_size]` float32; of unit length where `pooling` says so.
    """
    starts, ends = batch.indptr[:-1], batch.indptr[1:]
    if pooling.mode == "cls":
        pooled = hidden.index_select(0, starts).float()
    elif pooling.mode == "last":
        pooled = hidden.index_select(0, ends - 1).float()
    else:
        # Text by text, so that a text's sum does not depend on its neighbours.
        parts = hidden.float().split(list(batch.lengths))
        pooled = torch.stack([part.mean(dim=0) for part in parts])
    return normalize(pooled, dim=-1) if pooling.normalize else pooled
