"""Computes the entropies of a step's samples on the device."""

from __future__ import annotations

from typing import ClassVar

import torch

from runtime.extras.device_extras import DeviceExtra, Gathered, Reads, Samples

# Most logits that are processed at a time, because their probabilities need memory: 64 MiB.
MAX_LOGITS = 1 << 24


class Entropy(DeviceExtra):
    """Computes `-sum(p * ln p)` of the softmax of a sample's logits, one float32 per position.

    These are the model's own logits, without temperature, penalties, masks and biases, even if the
    token was sampled with them.
    """

    reads: ClassVar[Reads] = "raw_logits"

    def of_samples(self, samples: Samples) -> Gathered:
        """Compute the entropies at new tokens, for some rows at a time."""
        size = max(1, MAX_LOGITS // samples.values.shape[1])
        parts = [torch.special.entr(p.softmax(-1)).sum(-1) for p in samples.values.split(size)]
        return Gathered(samples.rows, [torch.cat(parts)])


EXTRA = Entropy
