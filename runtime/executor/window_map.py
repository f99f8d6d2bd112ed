"""Maps the pages of full-attention layers to the pages of sliding-window layers, on one rank.

If sliding-window layers have pages of their own, the scheduler's block tables contain the pages of
the other layers. This map gives the window page that belongs to each of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runtime.executor.staging import to_device
from runtime.models.attention.forward_batch import KVCache, WindowView
from runtime.step.step_plan import Int32Array, WindowUpdate


class WindowMap:
    """Gives sliding-window layers their block tables and the slots of new tokens.

    Attributes:
        host: `[num_pages + 1]` int32, the window page of each page; 0 for none. Page 0 is for
            padding and has window page 0.
        device: the same on the device. Its address does not change, so CUDA graphs may read it.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device) -> None:
        """Start without window pages; `num_pages` includes page 0."""
        self.host: Int32Array = np.zeros(num_pages, dtype=np.int32)
        self.device = torch.from_numpy(self.host)
        self._page_size = page_size
        self._shares_memory = device.type == "cpu"
        if not self._shares_memory:
            self.device = self.device.to(device)

    @torch.inference_mode()
    def update(self, changes: WindowUpdate) -> None:
        """Write the changes of a step's plan; steps in flight still read the old entries."""
        pages, window_pages = changes.pages.astype(np.int64), changes.window_pages
        self.host[pages] = window_pages
        if not self._shares_memory:
            index, values = to_device(self.device.device, pages, window_pages)
            self.device.index_copy_(0, index, values)

    def view(self, page_table: Tensor, slots: Tensor) -> WindowView:
        """Return the block tables and slots for sliding-window layers, without waiting.

        Args:
            page_table: `[num_seqs, max_pages]` int32, block tables of the other layers.
            slots: `[num_tokens]` int64, slots of the new tokens in the other layers; negative for
                tokens whose keys and values are not written.
        """
        size = self._page_size
        table = self.device.index_select(0, page_table.reshape(-1)).view(page_table.shape)
        pages = slots.clamp(min=0).div(size, rounding_mode="floor")
        moved = self.device.index_select(0, pages).long() * size + slots.remainder(size)
        return WindowView(table, torch.where(slots < 0, slots, moved))


def window_map(kv: list[KVCache], page_size: int, device: torch.device) -> WindowMap | None:
    """Return the map for a KV cache; `None` unless window layers have pages of their own.

    Args:
        kv: the KV cache, one entry per layer.
        page_size: number of tokens per page.
        device: where the map is read.
    """
    if not any(layer.is_windowed for layer in kv):
        return None
    num_pages = next(len(layer.k) for layer in kv if not layer.is_windowed)
    return WindowMap(num_pages, page_size, device)
