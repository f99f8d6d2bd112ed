"""Sampling once in every way, so that no running stream waits for kernels that compile."""

from __future__ import annotations

import numpy as np
import torch

from kernels.sampling import (
    SamplingRows,
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
    best_tokens,
    gather_logprobs,
    mask_tokens,
    nan_rows,
    sample,
)
from runtime.executor.staging import to_device

# Kernels differ with whether there are any; as many as OpenAI's API gives stand for all it gives.
_TOP_LOGPROBS = (0, 20)


@torch.inference_mode()
def warm_up_sampling(vocab_size: int, device: torch.device) -> None:
    """Run each sampling kernel on logits of zeros: plain, ranked, edited, with log-probabilities.

    Args:
        vocab_size: of the model; kernels are compiled for it.
        device: where the model samples.
    """
    num_rows = 2
    logits = torch.zeros(num_rows, vocab_size, device=device)
    # Parameters come with the step, and always aligned.
    ones, zeros = np.ones(num_rows, dtype=np.float32), np.zeros(num_rows, dtype=np.float32)
    temperature, top_p, min_p, frequency, presence, repetition, values = to_device(
        device, ones, ones.copy(), *(zeros.copy() for _ in range(3)), ones.copy(), zeros
    )
    index = torch.arange(num_rows, device=device)
    for is_ranked in (False, True):
        rows = SamplingRows(
            temperature=temperature,
            top_k=torch.ones(num_rows, dtype=torch.int32, device=device),
            top_p=top_p,
            min_p=min_p,
            seed=index,
            position=index,
            all_greedy=False,
            any_top_k=is_ranked,
            any_top_p=is_ranked,
            max_top_k=1,
        )
        sample(logits, rows)
    nan_rows(logits)
    ids = index.unsqueeze(1)
    for top_k in _TOP_LOGPROBS:
        gather_logprobs(logits, ids, top_k)
    mask = torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    for lines in (None, index):
        apply_token_bitmask(logits, mask, lines)
        best_tokens(logits, mask, lines)
    apply_penalties(logits, ids, index, frequency, presence, repetition, index)
    apply_logit_bias(logits, index, index, values)
    mask_tokens(logits, index, index)
