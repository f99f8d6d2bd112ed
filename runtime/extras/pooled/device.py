"""Vectors of texts: pooled already, in float32."""

from __future__ import annotations

from typing import ClassVar

from runtime.extras.device_extras import DeviceExtra, Gathered, Reads, Samples


class Vectors(DeviceExtra):
    """One vector a text, `[hidden_size]` float32."""

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Pass on what the model's runner has pooled."""
        return Gathered(samples.rows, [samples.values.float()])


EXTRA = Vectors
