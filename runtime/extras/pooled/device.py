"""Returns the vectors or scores of texts, which the model has computed."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.extras.device_extras import DeviceExtra, Gathered, Reads, Samples
from runtime.extras.pooled.parts import parts_of


class Numbers(DeviceExtra):
    """Returns the model's output for a text, a vector or scores, `[output_size]` float32."""

    reads: ClassVar[Reads] = "pooled"

    def __init__(self) -> None:
        """Start without requests."""
        self._parts: dict[int, tuple[int, int]] = {}

    def join(self, row: int, params: bytes) -> None:
        """Store the lengths of the parts of a text, which begins in `row` of the running batch.

        The parts are the first text of a pair, and a prompt before the text. Some models need them.
        """
        self._parts[row] = parts_of(params)

    def parts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of the parts of each text, `[n, 2]` int64; 0 for none.

        The first column is the length of the first text of a pair. The second column is the length
        of a prompt before the text, which the vector excludes.
        """
        found = [self._parts.get(row, (0, 0)) for row in rows.tolist()]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def of_samples(self, samples: Samples) -> Gathered:
        """Return the values that the model has computed for whole texts."""
        return Gathered(samples.rows, [samples.values.float()])


EXTRA = Numbers
