"""Returns the vectors of a text's tokens, which the model has computed."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples


class TokenVectors(DeviceExtra):
    """Returns one vector for each token of a text, `[token_size]` float32.

    The last token's vector is reported like a sampled token, the others like prompt positions.
    """

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Return the vectors of the texts' last tokens."""
        return _gathered(samples.rows, samples.values)

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Return the vectors of the other tokens."""
        return _gathered(part.rows, part.hidden)


def _gathered(rows: NDArray[np.int64], vectors: Tensor) -> Gathered:
    return Gathered(rows, [vectors], _finite_bytes)


def _finite_bytes(_: int, arrays: list[NDArray[Any]]) -> bytes:
    """Return the bytes of the vectors; empty if a number is not finite.

    This is checked here, because the event loop of the front process cannot check millions of
    numbers.
    """
    (vectors,) = arrays
    return vectors.tobytes() if np.isfinite(vectors).all() else b""


EXTRA = TokenVectors
