"""The input of one step of an encoder: whole texts, concatenated without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from runtime.models.attention.backend import AttentionBackend


@dataclass(frozen=True)
class SharedBeginnings:
    """The beginnings of texts whose keys and values another text of the batch computes.

    Attributes:
        lenders: `[num_texts]` int64, index of the text that computes the beginning. A text that
            shares nothing has its own index.
        lengths: `[num_texts]` int64, number of shared tokens. It is 0 for a text that shares
            nothing, and for every text that computes a beginning for others.
    """

    lenders: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass
class EncoderBatch:
    """The tokens of several texts, concatenated.

    Attributes:
        input_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, each token's index in its own text, from 0.
        lengths: for each text, the number of its tokens in the batch, at least 1.
        indptr: `[num_texts + 1]` int64, bounds of the texts, on the model's device.
        second_parts: `[num_tokens]` int64, 1 for tokens of the second text of a pair and 0 for
            others; `None` if the batch has no pairs.
        prompt_lens: number of tokens of the instruction at the start of each text. Pooling leaves
            these tokens out. `None` if no text has an instruction.
        attention: the back end of a causal model; `None` if tokens attend in both directions.
        shared: beginnings of texts that are not in the batch's tokens because another text computes
            them; `None` if the batch holds every text in full.
    """

    input_ids: Tensor
    positions: Tensor
    lengths: Sequence[int]
    indptr: Tensor
    second_parts: Tensor | None = None
    prompt_lens: Sequence[int] | None = None
    attention: AttentionBackend | None = None
    shared: SharedBeginnings | None = None
