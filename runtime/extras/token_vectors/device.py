"""Vectors of a text's tokens: made already, in float32."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.extras.device import DeviceExtra, Gathered, PromptPart, Reads, Samples


class TokenVectors(DeviceExtra):
    """One vector of each token, `[token_size]` float32; the last token's is its text's sample."""

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Pass on the last tokens' vectors."""
        return _gathered(samples.rows, samples.values)

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Pass on the vectors of the others."""
        return _gathered(part.rows, part.hidden)


def _gathered(rows: NDArray[np.int64], vectors: Tensor) -> Gathered:
    return Gathered(rows, [vectors], _finite_bytes)


def _finite_bytes(_: int, arrays: list[NDArray[Any]]) -> bytes:
    """The numbers, or nothing: to look at millions of them would hold the front's loop."""
    (vectors,) = arrays
    return vectors.tobytes() if np.isfinite(vectors).all() else b""


EXTRA = TokenVectors
