"""Hidden states of a step: picked on the device, in float32."""

from __future__ import annotations

from typing import ClassVar

import torch

from runtime.extras.device import DeviceExtra, Gathered, PromptPart, Reads, Samples


class HiddenStates(DeviceExtra):
    """What each token's logits are made of, `[hidden_size]` float32 a position."""

    reads: ClassVar[Reads] = "hidden"

    def of_samples(self, samples: Samples) -> Gathered:
        """Gather what new tokens are made of."""
        return Gathered(samples.rows, [samples.values.float()])

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Gather what the prompt's tokens became."""
        return Gathered(part.rows, [part.hidden.to(torch.float32, copy=True)])


EXTRA = HiddenStates
