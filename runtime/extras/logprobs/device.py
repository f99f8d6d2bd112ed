"""Computes log-probabilities of a step on the device.

For a prompt, the logits of a limited number of positions are computed at a time.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import gather_logprobs
from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples, Send
from runtime.extras.logprobs.positions import LogprobArrays, LogprobSpec

# Most logits of a prompt that are computed at a time: 64 MiB in float32.
MAX_LOGITS = 1 << 24


class Logprobs(DeviceExtra):
    """Computes log-probabilities of tokens.

    For output tokens they follow from the logits that were sampled from, for prompt tokens from the
    model's own logits.
    """

    reads: ClassVar[Reads] = "logits"

    def __init__(self) -> None:
        """Start without requests."""
        self._specs: dict[int, LogprobSpec] = {}

    def join(self, row: int, params: bytes) -> None:
        """Store which log-probabilities the request in `row` wants."""
        self._specs[row] = LogprobSpec.of(params)

    def of_samples(self, samples: Samples) -> Gathered:
        """Compute log-probabilities at new tokens.

        They are those of the distribution after temperature, before top-k, top-p or min-p remove
        tokens. Greedy rows have temperature 1.
        """
        logits, token_ids = samples.values, samples.token_ids
        assert token_ids is not None, "tokens are known when the sampled logits are read"
        if (samples.temperature != 1).any():
            (divisor,) = samples.send(samples.temperature)
            logits /= divisor.unsqueeze(1)
        specs = [self._specs[row] for row in samples.rows.tolist()]
        chosen = token_ids.clamp_(min=0)
        return _gathered(samples.rows, specs, _look_up(logits, chosen, specs, samples.send))

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Compute log-probabilities at prompt tokens, for some positions at a time."""
        size = max(1, MAX_LOGITS // part.vocab_size)
        (targets,) = part.send(part.next_tokens.astype(np.int64))
        specs = [self._specs[part.row]] * len(targets)
        found = [
            _look_up(
                part.compute_logits(part.hidden[first : first + size]),
                targets[first : first + size],
                specs[first : first + size],
                part.send,
            )
            for first in range(0, len(targets), size)
        ]
        tensors = found[0]
        if len(found) > 1:
            tensors = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return _gathered(part.rows, specs, tensors)


def _look_up(
    logits: Tensor, token_ids: Tensor, specs: list[LogprobSpec], send: Send
) -> list[Tensor]:
    """Return the log-probabilities that `specs` request; each tensor has the largest width needed.

    Args:
        logits: `[n, vocab_size]` float32, not changed.
        token_ids: `[n]` int64, the actual token of each row of `logits`.
        specs: `[n]`, what the request of each row wants.
        send: copies arrays to the device.

    Returns:
        Log-probability of the actual tokens, `[n]` float32; the largest log-probabilities,
        `[n, top_num]` float32, descending, and their tokens, int32; log-probabilities of the
        requested ids, `[n, num_ids]` float32.
    """
    top_num = max(spec.top_num for spec in specs)
    num_ids = max(len(spec.token_ids) for spec in specs)
    looked_up = token_ids.unsqueeze(1)
    if num_ids:
        wanted = np.zeros((len(specs), num_ids), dtype=np.int64)
        for index, spec in enumerate(specs):
            wanted[index, : len(spec.token_ids)] = spec.token_ids
        (ids,) = send(wanted)
        looked_up = torch.cat([looked_up, ids], dim=1)
    values, top_values, top_ids = gather_logprobs(logits, looked_up, top_num)
    return [values[:, 0], top_values, top_ids.to(torch.int32), values[:, 1:]]


def _gathered(rows: NDArray[np.int64], specs: list[LogprobSpec], tensors: list[Tensor]) -> Gathered:
    def pack(first: int, arrays: list[NDArray[Any]]) -> bytes:
        # The values are cut to the width that the row's request wants.
        spec = specs[first]
        chosen, top_values, top_ids, id_values = arrays
        return LogprobArrays(
            chosen.tobytes(),
            top_values[:, : spec.top_num].tobytes(),
            top_ids[:, : spec.top_num].tobytes(),
            id_values[:, : len(spec.token_ids)].tobytes(),
        ).encode()

    return Gathered(rows, tensors, pack)


EXTRA = Logprobs
