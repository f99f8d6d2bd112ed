"""Vectors or scores of texts, which the model has computed in float32."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.extras.device_extras import DeviceExtra, Gathered, Reads, Samples
from runtime.extras.pooled.parts import parts_of


class Numbers(DeviceExtra):
    """The model's output for a text, `[output_size]` float32."""

    reads: ClassVar[Reads] = "pooled"

    def __init__(self) -> None:
        """Start without pairs and without prompts."""
        self._parts: dict[int, tuple[int, int]] = {}

    def join(self, row: int, params: bytes) -> None:
        """Store where a pair's second text begins, or where the text after its prompt begins."""
        self._parts[row] = parts_of(params)

    def parts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `[n, 2]`: lengths of each pair's first text and of each prompt; 0 for none."""
        found = [self._parts.get(row, (0, 0)) for row in rows.tolist()]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def of_samples(self, samples: Samples) -> Gathered:
        """Return the numbers that the model's runner has pooled."""
        return Gathered(samples.rows, [samples.values.float()])


EXTRA = Numbers
