"""Entropies of a step, computed on the device."""

from __future__ import annotations

from typing import ClassVar

import torch

from runtime.extras.device_extras import DeviceExtra, Gathered, Reads, Samples

# Most logits whose probabilities exist at a time: 64 MiB in float32.
MAX_LOGITS = 1 << 24


class Entropy(DeviceExtra):
    """`-sum(p * ln p)` of the softmax of a sample's logits, one float32 for each position.

    The logits are the model's own, without temperature, penalty, mask or bias, however the token
    was sampled.
    """

    reads: ClassVar[Reads] = "raw_logits"

    def of_samples(self, samples: Samples) -> Gathered:
        """Gather the entropies of new tokens' logits, some rows at a time."""
        size = max(1, MAX_LOGITS // samples.values.shape[1])
        parts = [torch.special.entr(p.softmax(-1)).sum(-1) for p in samples.values.split(size)]
        return Gathered(samples.rows, [torch.cat(parts)])


EXTRA = Entropy
