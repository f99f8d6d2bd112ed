"""One step's input to an encoder: whole texts, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from runtime.models.attention.backend import AttentionBackend


@dataclass
class EncoderBatch:
    """Tokens of several texts, flattened.

    Attributes:
        input_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, each token's place in its own text, from 0.
        lengths: tokens of each text, in order, each at least 1.
        indptr: `[num_texts + 1]` int64, bounds of the texts, on the model's device.
        second_parts: `[num_tokens]` int64, 1 for tokens of the second text of a pair; `None` where
            there are none.
        prompt_lens: tokens ahead of each text that its vector leaves out; `None` for none.
        attention: what a model whose tokens see none behind them attends with; `None` for others.
    """

    input_ids: Tensor
    positions: Tensor
    lengths: Sequence[int]
    indptr: Tensor
    second_parts: Tensor | None = None
    prompt_lens: Sequence[int] | None = None
    attention: AttentionBackend | None = None
