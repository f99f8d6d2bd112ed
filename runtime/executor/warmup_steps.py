"""Runs steps before the first request, to compile kernels, fill caches, and test the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.linear import GATED_TOKENS
from kernels.prompt_attention.cudnn import MIN_LENGTH
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
from runtime.errors import StartupError
from runtime.executor.model_runner import StepRunner
from runtime.executor.out_of_memory import STEP_OUT_OF_MEMORY
from runtime.executor.staging import to_device
from runtime.requests.request_spec import RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.step.step_plan import PageUpdate, RowJoin, StepPlan

# Numbers of top log-probabilities to warm up. The kernels are the same for all numbers above 0; 20
# is OpenAI's maximum.
_TOP_LOGPROBS = (0, 20)


@torch.inference_mode()
def warm_up_sampling(vocab_size: int, device: torch.device) -> None:
    """Run each sampling kernel once on zeros.

    Args:
        vocab_size: size of the model's vocabulary; kernels are compiled for this size.
        device: where the model samples.
    """
    num_rows = 2
    logits = torch.zeros(num_rows, vocab_size, device=device)
    # The parameters are sent as they are for a step, because their alignment affects the kernels.
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
    for sample_indices in (None, index):
        apply_token_bitmask(logits, mask, sample_indices)
        best_tokens(logits, mask, sample_indices)
    apply_penalties(logits, ids, index, frequency, presence, repetition, index)
    apply_logit_bias(logits, index, index, values)
    mask_tokens(logits, index, index)


_ZERO = np.zeros(1, dtype=np.int64)
# Larger steps use the same kernels as a step of this many tokens.
_MANY_TOKENS = 16_384


@dataclass(frozen=True)
class Prompts:
    """A warm-up step: `num_seqs` prompts of `length` tokens, each after `cached` cached tokens."""

    length: int
    num_seqs: int = 1
    cached: int = 0


def prompts_to_compile(max_tokens: int, context_len: int, max_seqs: int) -> list[Prompts]:
    """Return steps that together use every kernel that prompts need on a GPU.

    Args:
        max_tokens: maximum number of prompt tokens of a step.
        context_len: maximum number of tokens of a sequence.
        max_seqs: maximum number of sequences of a step.
    """
    max_tokens = min(max_tokens, _MANY_TOKENS)
    longest = context_len - 1
    lengths = (2, 5, 12, 24, 48, 96, 200, GATED_TOKENS)
    steps = [Prompts(min(length, longest, max_tokens)) for length in lengths]
    # A full step has the largest blocks of queries. cuDNN does not run whole prompts shorter than
    # `MIN_LENGTH`.
    mean = max_tokens // max(1, min(max_seqs, max_tokens // 256))
    for cached, most in ((0, min(MIN_LENGTH - 1, longest)), (1, longest - 1)):
        length = max(1, min(mean, most))
        steps.append(Prompts(length, min(max_seqs, max_tokens // length), cached))
    return steps


def compute_prompts(
    runner: StepRunner, prompts: Prompts, vocab_size: int, num_pages: int = 0
) -> None:
    """Compute warm-up prompts in the first rows of the batch.

    Args:
        runner: a runner without steps in flight.
        prompts: number and length of the prompts.
        vocab_size: all token ids are below this.
        num_pages: the prompt in row 0 writes pages 1 to `num_pages`. The other prompts write page
            0, the padding page.

    Raises:
        StartupError: the model fails.
        MemoryError: there is too little memory, for the whole step or for a single sequence of it.
    """
    length, num_seqs = prompts.length, prompts.num_seqs
    spec = RowSpec(sampling=SamplingParams(max_new_tokens=2, temperature=0.0))
    joins = [
        RowJoin(
            row=row,
            spec=spec,
            num_prompt=length,
            output_ids=np.empty(0, dtype=np.int32),
        )
        for row in range(num_seqs)
    ]
    pages = np.arange(1, num_pages + 1, dtype=np.int32)
    _launch(
        runner,
        StepPlan(
            rows=np.arange(num_seqs),
            num_decodes=0,
            start_lens=np.full(num_seqs, prompts.cached),
            query_lens=np.full(num_seqs, length),
            chunk_tokens=(np.arange(num_seqs * length) % vocab_size).astype(np.int32),
            samples=np.ones(num_seqs, dtype=bool),
            joins=joins,
            page_updates=[PageUpdate(0, 0, pages)] if num_pages else [],
        ),
    )


def warm_up(runner: StepRunner, vocab_size: int, page_size: int, context_len: int) -> None:
    """Compute a short prompt, then decode one token after it.

    Raises:
        StartupError: the model fails.
        MemoryError: there is too little memory.
    """
    length = min(8, page_size - 1, context_len - 1) or 1
    compute_prompts(runner, Prompts(length), vocab_size)
    _launch(
        runner,
        StepPlan(
            rows=_ZERO,
            num_decodes=1,
            start_lens=_ZERO + length,
            query_lens=_ZERO + 1,
            chunk_tokens=np.empty(0, dtype=np.int32),
            samples=np.ones(1, dtype=bool),
        ),
    )


def _launch(runner: StepRunner, plan: StepPlan) -> None:
    result = runner.launch(plan).wait()
    if not result.failed:
        return
    reason = next(iter(result.failed.values()))
    if reason == STEP_OUT_OF_MEMORY:
        raise MemoryError("a step at start-up")
    raise StartupError(f"The model cannot compute a step: {reason}")
