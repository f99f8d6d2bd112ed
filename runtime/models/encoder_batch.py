"""One step's input to an encoder: whole texts, packed without padding."""

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
    """The beginnings that texts have in common with another text of the batch, which computes them.

    Attributes:
        lenders: `[num_texts]` int64, index of the text that computes the beginning. A text that
            shares nothing has its own index.
        lengths: `[num_texts]` int64, number of shared tokens: 0 for a text that shares nothing, and
            for every lender.
    """

    lenders: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass
class EncoderBatch:
    """Tokens of several texts, flattened.

    Attributes:
        input_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, each token's index in its own text, from 0.
        lengths: tokens of each text that are in the batch, in order, each at least 1.
        indptr: `[num_texts + 1]` int64, bounds of the texts, on the model's device.
        second_parts: `[num_tokens]` int64, 1 for tokens of the second text of a pair; `None` where
            there are none.
        prompt_lens: number of tokens at the start of each text, its instruction, that the pooling
            of its vector leaves out; `None` if no text has an instruction.
        attention: the back end of a causal model; `None` for others.
        shared: tokens before those of `lengths` that another text of the batch computes; `None` if
            the batch holds every text in full.
    """

    input_ids: Tensor
    positions: Tensor
    lengths: Sequence[int]
    indptr: Tensor
    second_parts: Tensor | None = None
    prompt_lens: Sequence[int] | None = None
    attention: AttentionBackend | None = None
    shared: SharedBeginnings | None = None
