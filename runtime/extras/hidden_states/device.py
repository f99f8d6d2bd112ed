"""Hidden states of a step: selected on the device, in float32."""

from __future__ import annotations

from typing import ClassVar

import torch

from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples


class HiddenStates(DeviceExtra):
    """The hidden state behind each token's logits, `[hidden_size]` float32 per position."""

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Gather the hidden states behind new tokens."""
        return Gathered(samples.rows, [samples.values.float()])

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Gather the hidden states of the prompt's tokens."""
        return Gathered(part.rows, [part.hidden.to(torch.float32, copy=True)])


EXTRA = HiddenStates
