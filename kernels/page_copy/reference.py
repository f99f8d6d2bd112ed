"""Copies pages between the KV cache and host memory in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_pages(
    parts: Sequence[Tensor], pages: Tensor, host: Tensor, host_pages: Tensor, *, to_host: bool
) -> None:
    """Copy part by part; see `kernels.page_copy.copy_pages`."""
    # Wide words are copied faster than bytes.
    is_wide = not any(part[0].nbytes % 8 for part in parts)
    word = torch.int64 if is_wide else torch.uint8
    host, first = host.view(word), 0
    for part in parts:
        rows = part.flatten(1).view(word)
        columns = host[:, first : first + rows.shape[1]]
        if to_host:
            columns[host_pages] = rows[pages]
        else:
            rows[pages] = columns[host_pages]
        first += rows.shape[1]
