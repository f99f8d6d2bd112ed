"""In-place changes to logits before sampling: penalties, biases and masks."""

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    output_ids: Tensor,
    output_lens: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
    row_index: Tensor | None = None,
) -> None:
    """Lower the logits of generated tokens; see `kernels.sampling.apply_penalties`."""
    if row_index is not None:
        part = logits.index_select(0, row_index)
        apply_penalties(part, output_ids, output_lens, frequency, presence, repetition)
        logits.index_copy_(0, row_index, part)
        return
    vocab_size = logits.shape[1]
    max_len = output_ids.shape[1]
    if max_len == 0 or logits.shape[0] == 0:
        return
    valid = torch.arange(max_len, device=logits.device) < output_lens.unsqueeze(1)
    # Each id is counted by a search in the row's sorted ids, so no [batch, vocab_size] tensor is
    # needed.
    in_order = output_ids.masked_fill(~valid, vocab_size).sort(dim=-1).values
    ids = torch.where(valid, output_ids, output_ids[:, :1])
    # Padding repeats the row's first token and so writes the same value. A row without output
    # writes the logit of token 0 back unchanged.
    ids = ids.masked_fill((output_lens == 0).unsqueeze(1), 0)
    stop = torch.searchsorted(in_order, ids, right=True)
    count = stop - torch.searchsorted(in_order, ids)
    old = logits.gather(1, ids)
    factor = repetition.unsqueeze(1)
    repeated = torch.where(old >= 0, old / factor, old * factor)
    new = repeated - frequency.unsqueeze(1) * count - presence.unsqueeze(1)
    logits.scatter_(1, ids, torch.where(count > 0, new, old))


def apply_logit_bias(logits: Tensor, row_index: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add values to single logits in place; see `kernels.sampling.apply_logit_bias`."""
    logits.index_put_((row_index, token_ids), values, accumulate=True)


def mask_tokens(logits: Tensor, row_index: Tensor, token_ids: Tensor) -> None:
    """Set single logits to minus infinity in place; see `kernels.sampling.mask_tokens`."""
    logits[row_index, token_ids] = float("-inf")


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, row_index: Tensor | None = None) -> None:
    """Forbid tokens whose bit in a mask is 0; see `kernels.sampling.apply_token_bitmask`."""
    if row_index is not None:
        part = logits.index_select(0, row_index)
        apply_token_bitmask(part, bitmask)
        logits.index_copy_(0, row_index, part)
        return
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    allowed = (bitmask.unsqueeze(-1) >> bits) & 1
    allowed = allowed.view(bitmask.shape[0], bitmask.shape[1] * 32)[:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, float("-inf"))
