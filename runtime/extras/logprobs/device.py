"""Log-probabilities of a step, gathered on the device.

Rows that do not request them cost no time. Only a bounded part of a prompt's logits exists at a
time.
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

# Most logits of a prompt that exist at a time: 64 MiB in float32.
MAX_LOGITS = 1 << 24


class Logprobs(DeviceExtra):
    """Log-probabilities: of output tokens from sampled logits, of prompt tokens from raw ones."""

    reads: ClassVar[Reads] = "logits"

    def __init__(self) -> None:
        """Start without rows."""
        self._specs: dict[int, LogprobSpec] = {}

    def join(self, row: int, params: bytes) -> None:
        """Store the request of the row."""
        self._specs[row] = LogprobSpec.of(params)

    def of_samples(self, samples: Samples) -> Gathered:
        """Use the distribution before any token is cut off; greedy rows have temperature 1."""
        logits, token_ids = samples.values, samples.token_ids
        assert token_ids is not None, "tokens are known when the sampled logits are read"
        if (samples.temperature != 1).any():
            (divisor,) = samples.send(samples.temperature)
            logits /= divisor.unsqueeze(1)
        specs = [self._specs[row] for row in samples.rows.tolist()]
        chosen = token_ids.clamp_(min=0)
        return _gathered(samples.rows, specs, _look_up(logits, chosen, specs, samples.send))

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Gather log-probabilities of prompt tokens; raw logits are computed a part at a time."""
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
    """Look up what `specs` request; the tensors are as wide as the largest request.

    Args:
        logits: `[n, vocab_size]` float32, not modified.
        token_ids: `[n]` int64, the token of each row of `logits`.
        specs: `[n]`.
        send: sends arrays to the device.

    Returns:
        The tokens' log-probabilities `[n]` float32; the largest ones `[n, top_num]` float32,
        descending, and their tokens, int32; those of the given ids `[n, num_ids]` float32.
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
        # Cut to the size that the row requested.
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
