"""Log-probabilities of a step: gathered on the device, read on the host when the step is awaited.

Only rows that asked are touched, and no more than a bounded part of a prompt's logits exists at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import gather_logprobs
from runtime.executor.staging import to_device
from runtime.executor.step_plan import Int32Array, Int64Array, TokenLogprobs
from runtime.ipc.messages import LogprobSpec

# Logits of a prompt that exist at a time: 64 MiB in float32.
MAX_LOGITS = 1 << 24


@dataclass
class StepLogprobs:
    """Log-probabilities of `n` lines, on the device or on their way to the host.

    Attributes:
        rows: `[n]`, whose each line is, on the host.
        specs: what each line's row wants; others may have made the tensors wider.
        chosen: `[n]` float32.
        top_values: `[n, top_num]` float32, descending.
        top_ids: `[n, top_num]` int32.
        id_values: `[n, num_ids]` float32.
    """

    rows: Int64Array
    specs: list[LogprobSpec]
    chosen: Tensor
    top_values: Tensor
    top_ids: Tensor
    id_values: Tensor

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> StepLogprobs:
        """The same with every tensor copied by `copy`, which need not wait."""
        return StepLogprobs(
            self.rows,
            self.specs,
            copy(self.chosen),
            copy(self.top_values),
            copy(self.top_ids),
            copy(self.id_values),
        )

    def by_row(self) -> dict[int, TokenLogprobs]:
        """Each row's lines (they follow one another), cut to what it wants; on the host only."""
        chosen, top_values = self.chosen.numpy(), self.top_values.numpy()
        top_ids, id_values = self.top_ids.numpy(), self.id_values.numpy()
        starts = np.flatnonzero(np.diff(self.rows, prepend=-1)).tolist()
        found: dict[int, TokenLogprobs] = {}
        for begin, end in zip(starts, [*starts[1:], len(self.rows)], strict=True):
            spec = self.specs[begin]
            found[int(self.rows[begin])] = TokenLogprobs(
                chosen=chosen[begin:end],
                top_values=top_values[begin:end, : spec.top_num],
                top_ids=top_ids[begin:end, : spec.top_num],
                id_values=id_values[begin:end, : len(spec.token_ids)],
            )
        return found


def gather(
    logits: Tensor, token_ids: Tensor, rows: Int64Array, specs: list[LogprobSpec]
) -> StepLogprobs:
    """Look up what `specs` ask for.

    Args:
        logits: `[n, vocab_size]` float32, left as they are.
        token_ids: `[n]` int64, the token of each line.
        rows: `[n]`, on the host.
        specs: `[n]`.
    """
    top_num = max(spec.top_num for spec in specs)
    num_ids = max(len(spec.token_ids) for spec in specs)
    looked_up = token_ids.unsqueeze(1)
    if num_ids:
        wanted = np.zeros((len(specs), num_ids), dtype=np.int64)
        for line, spec in enumerate(specs):
            wanted[line, : len(spec.token_ids)] = spec.token_ids
        (ids,) = to_device(logits.device, wanted)
        looked_up = torch.cat([looked_up, ids], dim=1)
    values, top_values, top_ids = gather_logprobs(logits, looked_up, top_num)
    chosen, id_values = values[:, 0], values[:, 1:]
    return StepLogprobs(rows, specs, chosen, top_values, top_ids.to(torch.int32), id_values)


def gather_prompt(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    targets: Int32Array,
    row: int,
    spec: LogprobSpec,
    vocab_size: int,
) -> StepLogprobs:
    """Log-probabilities of a prompt's tokens, with raw logits made a part at a time.

    Args:
        hidden: `[n, hidden_size]`, of consecutive positions.
        compute_logits: the model's head.
        targets: `[n]`, the token after each position.
        row: whose prompt it is.
        spec: what it wants.
        vocab_size: the logits' width.
    """
    size = max(1, MAX_LOGITS // vocab_size)
    (target_ids,) = to_device(hidden.device, targets.astype(np.int64))
    parts = [
        gather(
            compute_logits(hidden[first : first + size]),
            target_ids[first : first + size],
            np.full(len(targets[first : first + size]), row, dtype=np.int64),
            [spec] * len(targets[first : first + size]),
        )
        for first in range(0, len(targets), size)
    ]
    return parts[0] if len(parts) == 1 else join(parts)


def join(parts: list[StepLogprobs]) -> StepLogprobs:
    """Lines of one row, one part after another."""
    return StepLogprobs(
        np.concatenate([part.rows for part in parts]),
        [spec for part in parts for spec in part.specs],
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_values for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.id_values for part in parts]),
    )
