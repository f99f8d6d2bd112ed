"""The experts that a step's tokens chose, recorded for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertCounts:
    """A record on the device of the experts that the current step's tokens chose.

    Nothing is recorded unless requested. Small steps are recorded at fixed addresses, so that a
    CUDA graph can do it.

    Attributes:
        shape: number of layers, including dense ones, and number of experts.
        is_on: whether every step is recorded.
        is_asked: whether this step is recorded because one of its requests needs it.
        keeps_ids: whether `take` also returns the experts of each token.
        num_tokens: number of recorded tokens of the latest step; 0 if it is not recorded.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_chosen: int,
        layers: Sequence[int],
        *,
        most_in_graphs: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Allocate memory for small steps; recording is off.

        Args:
            num_layers: layers of the model.
            num_experts: experts of a layer.
            num_chosen: experts that a token passes in a layer.
            layers: indices of the layers that have experts, in order.
            most_in_graphs: maximum number of tokens of a step that a CUDA graph may compute.
            device: device of the model.
        """
        self.shape = (num_layers, num_experts)
        self.is_on = self.is_asked = self.keeps_ids = False
        self.num_tokens = 0
        self._in_graphs = False
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._layers = torch.tensor(list(layers), dtype=torch.int64, device=device)
        shape = (len(layers), most_in_graphs, num_chosen)
        self._kept = torch.zeros(shape, dtype=torch.int32, device=device)
        # The chosen experts of a step that is too large for `_kept`, by layer.
        self._large: dict[int, Tensor] = {}

    def note_in_graphs(self) -> None:
        """Record every small step from now on, because a graph repeats what was captured."""
        self._in_graphs = True

    def note(self, layer_idx: int, expert_ids: Tensor) -> None:
        """Record the experts of layer `layer_idx`, `[num_tokens, num_chosen]` int64."""
        if not (self.is_on or self.is_asked or self._in_graphs):
            return
        place, num_tokens = self._places[layer_idx], len(expert_ids)
        if not place:
            self.num_tokens = num_tokens
            self._large.clear()
        if num_tokens <= self._kept.shape[1]:
            self._kept[place, :num_tokens].copy_(expert_ids)
        else:
            self._large[place] = expert_ids.to(torch.int32)

    def ids(self) -> Tensor:
        """Return the step's experts, `[layers with experts, num_tokens, num_chosen]` int32.

        Every layer must have recorded every token. The next step may overwrite the result.
        """
        if self._large:
            return torch.stack([self._large[place] for place in range(len(self._places))])
        return self._kept[:, : self.num_tokens]

    def take(self) -> tuple[Tensor, Tensor]:
        """Return how many tokens chose each expert in this step, and clear the record.

        Returns:
            The counts, `[num_layers, num_experts]` int64, and the chosen experts. With `keeps_ids`
            these are `[num_layers, num_tokens, num_chosen]` int32, -1 in dense layers; without it
            they are empty. Both are on the device.
        """
        num_layers, num_experts = self.shape
        counts = torch.zeros(self.shape, dtype=torch.int64, device=self._kept.device)
        if not self.num_tokens:
            return counts, self._kept.new_zeros(num_layers, 0, 0)
        ids = self.ids()
        self.num_tokens = 0
        self._large.clear()
        flat = ids.flatten(1).long()
        made = counts.new_zeros(len(flat), num_experts)
        counts.index_copy_(0, self._layers, made.scatter_add_(1, flat, torch.ones_like(flat)))
        if not self.keeps_ids:
            return counts, ids[:0]
        kept = ids.new_full((num_layers, *ids.shape[1:]), -1)
        return counts, kept.index_copy_(0, self._layers, ids)
