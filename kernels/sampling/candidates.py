"""The most probable tokens of each row in a defined order."""

import torch
from torch import Tensor


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of each row: descending, equal ones by ascending id.

    `torch.topk` does not define the order of equal values, nor which of them it returns, and 16-bit
    logits have many equal values. Here a longer list always starts with the shorter one.

    Args:
        logits: `[batch, vocab_size]` float32.
        count: at least 1. For more than half of the vocabulary, the whole row is sorted.

    Returns:
        `[batch, count]` float32 values and `[batch, count]` int64 ids; `count` is limited to the
        vocabulary.
    """
    vocab_size = logits.shape[1]
    if count * 2 >= vocab_size:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    # One value more than requested shows whether a run of equal values crosses the end of the list.
    values, ids = torch.topk(logits, count + 1, dim=-1)
    crossed = (values[:, count] == values[:, count - 1]).nonzero().squeeze(1)
    values, ids = values[:, :count], ids[:, :count]
    if crossed.numel():
        ids = ids.clone()
        edge = values[crossed, -1:]
        at_edge = values[crossed] == edge
        # Row-major order: each row's equal tokens by ascending id.
        equal_row, equal_id = (logits[crossed] == edge).nonzero(as_tuple=True)
        row_start = torch.searchsorted(equal_row, torch.arange(len(crossed), device=ids.device))
        rank = torch.arange(len(equal_row), device=ids.device) - row_start[equal_row]
        chosen = rank < at_edge.sum(-1)[equal_row]
        rewritten = ids[crossed]
        rewritten[at_edge] = equal_id[chosen]
        ids[crossed] = rewritten
    by_id = ids.argsort(dim=-1)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
