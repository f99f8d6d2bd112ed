"""Vectors of a text's tokens; the model has computed them, in float32."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples


class TokenVectors(DeviceExtra):
    """One vector for each token, `[token_size]` float32; the last token's is the text's sample."""

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Pass on the last tokens' vectors."""
        return _gathered(samples.rows, samples.values)

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Pass on the vectors of the other tokens."""
        return _gathered(part.rows, part.hidden)


def _gathered(rows: NDArray[np.int64], vectors: Tensor) -> Gathered:
    return Gathered(rows, [vectors], _finite_bytes)


def _finite_bytes(_: int, arrays: list[NDArray[Any]]) -> bytes:
    """The bytes, empty if not finite; checking millions of numbers would block the front's loop."""
    (vectors,) = arrays
    return vectors.tobytes() if np.isfinite(vectors).all() else b""


EXTRA = TokenVectors
