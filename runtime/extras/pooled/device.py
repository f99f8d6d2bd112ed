"""Numbers of texts, vectors or scores: made already, in float32."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.extras.device import DeviceExtra, Gathered, Reads, Samples
from runtime.extras.pooled.parts import parts_of


class Numbers(DeviceExtra):
    """What the model gives for a text, `[output_size]` float32."""

    reads: ClassVar[Reads] = "pooled"

    def __init__(self) -> None:
        """No text is a pair, and none has a prompt."""
        self._parts: dict[int, tuple[int, int]] = {}

    def join(self, row: int, params: bytes) -> None:
        """Note where the second text of a pair begins, or a text behind its prompt."""
        self._parts[row] = parts_of(params)

    def parts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """`[n, 2]`: tokens of the first text of each row's pair, and of its prompt; 0 for none."""
        found = [self._parts.get(row, (0, 0)) for row in rows.tolist()]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def of_samples(self, samples: Samples) -> Gathered:
        """Pass on what the model's runner has pooled."""
        return Gathered(samples.rows, [samples.values.float()])


EXTRA = Numbers
