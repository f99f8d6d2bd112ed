"""Vectors of a text's tokens, which the model has computed in float32."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples


class TokenVectors(DeviceExtra):
    """One vector for each token, `[token_size]` float32.

    The last token's vector is the text's sample.
    """

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Return the last tokens' vectors."""
        return _gathered(samples.rows, samples.values)

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Return the vectors of the other tokens."""
        return _gathered(part.rows, part.hidden)


def _gathered(rows: NDArray[np.int64], vectors: Tensor) -> Gathered:
    return Gathered(rows, [vectors], _finite_bytes)


def _finite_bytes(_: int, arrays: list[NDArray[Any]]) -> bytes:
    """Return the bytes, empty if not finite. The front's loop cannot check millions of numbers."""
    (vectors,) = arrays
    return vectors.tobytes() if np.isfinite(vectors).all() else b""


EXTRA = TokenVectors
