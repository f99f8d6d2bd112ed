"""Where the layers of a model note which experts a step's tokens chose."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertCounts:
    """Counts of the step that is computed, on the device; nothing is done while it is off.

    Attributes:
        shape: number of layers, dense ones too, and of experts.
        is_on: whether layers count.
        keeps_ids: whether each token's experts are kept, too.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Count nothing yet."""
        self.shape = (num_layers, num_experts)
        self.is_on = self.keeps_ids = False
        self._counts: dict[int, Tensor] = {}
        self._ids: dict[int, Tensor] = {}

    def note(self, layer_idx: int, expert_ids: Tensor) -> None:
        """Count a layer's choices, `[num_tokens, num_chosen]` int64."""
        flat = expert_ids.flatten()
        counts = torch.zeros(self.shape[1], dtype=torch.int64, device=flat.device)
        self._counts[layer_idx] = counts.scatter_add_(0, flat, torch.ones_like(flat))
        if self.keeps_ids:
            self._ids[layer_idx] = expert_ids.to(torch.int32)

    def take(self) -> tuple[Tensor, Tensor]:
        """The step's counts, `[num_layers, num_experts]` int64, and begin the next one's.

        Returns:
            The counts, and if they are kept the ids, `[num_layers, num_tokens, num_chosen]` int64,
            -1 in dense layers; both on the device.
        """
        counts, ids = self._counts, self._ids
        self._counts, self._ids = {}, {}
        if not counts:
            return torch.zeros(self.shape, dtype=torch.int64), torch.zeros(self.shape[0], 0, 0)
        any_counts = next(iter(counts.values()))
        rows = [counts.get(i, torch.zeros_like(any_counts)) for i in range(self.shape[0])]
        if not ids:
            return torch.stack(rows), any_counts[:0]
        nothing = torch.full_like(next(iter(ids.values())), -1)
        return torch.stack(rows), torch.stack([ids.get(i, nothing) for i in range(self.shape[0])])
