"""Numbers of texts, vectors or scores: made already, in float32."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.extras.device_extras import DeviceExtra, Gathered, Reads, Samples


class Numbers(DeviceExtra):
    """What the model gives for a text, `[output_size]` float32."""

    reads: ClassVar[Reads] = "hidden"

    def __init__(self) -> None:
        """No text is a pair."""
        self._first_parts: dict[int, int] = {}

    def join(self, row: int, params: bytes) -> None:
        """Note where the second text of a pair begins."""
        self._first_parts[row] = int.from_bytes(params, "little")

    def first_parts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """`[n]`, tokens of the first text of each row's pair; 0 where there is but one text."""
        return np.array([self._first_parts.get(row, 0) for row in rows.tolist()], dtype=np.int64)

    def of_samples(self, samples: Samples) -> Gathered:
        """Pass on what the model's runner has pooled."""
        return Gathered(samples.rows, [samples.values.float()])


EXTRA = Numbers
