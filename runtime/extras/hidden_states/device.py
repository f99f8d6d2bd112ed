"""Selects the hidden states of a step on the device."""

from __future__ import annotations

from typing import ClassVar

import torch

from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples


class HiddenStates(DeviceExtra):
    """Returns the hidden state from which each token's logits are computed, as float32.

    The shape is `[hidden_size]` for each position.
    """

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Return the hidden states from which new tokens were sampled."""
        return Gathered(samples.rows, [samples.values.float()])

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Return the hidden states of the prompt's tokens."""
        return Gathered(part.rows, [part.hidden.to(torch.float32, copy=True)])


EXTRA = HiddenStates
