"""Steps that sample in every way, with several batch sizes, biases and log-probabilities."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from runtime.executor.batch_rows import BatchRows
from runtime.executor.sampler import Sampler
from runtime.executor.staging import to_device
from runtime.extras.device_extras import PromptPart
from runtime.extras.logprobs.device import Logprobs
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.request_spec import RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.step.step_plan import RowJoin, TokenMasks

_PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "repetition_penalty": 1.5,
}
# Sampling parameters of the rows of a step: of all rows, or of the last row only.
_WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logit_bias": {7: 1.0}},
    {"logit_bias": dict.fromkeys(range(3, 19), 1.0)},
    {"min_new_tokens": 90},
    _PENALTIES,
]
_SPECS = [
    None,
    *(LogprobSpec(top_num=number) for number in (0, 1, 2, 3, 5, 16, 17, 20)),
    LogprobSpec(token_ids=list(range(15))),
]
_LEN = 64


@torch.inference_mode()
def sample_in_steps(batch: int, vocab_size: int, device: torch.device) -> None:
    """Sample `batch` rows with each of `_WISHES`, and look up a prompt's log-probabilities.

    Args:
        batch: number of rows of a step.
        vocab_size: number of logits per row; all of them are 0.
        device: the device that samples.
    """
    logits = torch.zeros(batch, vocab_size, device=device)
    for wish in _WISHES:
        for who in {1, batch}:
            _step(logits, wish, who, None)
    for spec in _SPECS[1:]:
        _step(logits, {}, batch, spec)
    for num_masks in {1, batch}:
        words = np.full((num_masks, -(-vocab_size // 32)), -1, dtype=np.int32)
        masks = TokenMasks(np.arange(num_masks), words)
        for temperature in (0.0, 1.0):
            _step(logits, {"temperature": temperature}, batch, None, masks)
    targets = np.zeros(2 * batch + 1, dtype=np.int32)
    hidden = torch.zeros(len(targets), 1, device=device)
    for spec in (LogprobSpec(), LogprobSpec(top_num=4, token_ids=[1])):
        part = PromptPart(
            0,
            hidden,
            targets,
            lambda part: logits.new_zeros(len(part), vocab_size),
            vocab_size,
            partial(to_device, device),
        )
        logprobs = Logprobs()
        logprobs.join(0, spec.extra().params)
        logprobs.of_prompt(part)


def _step(
    logits: torch.Tensor,
    wish: dict[str, Any],
    num_wishing: int,
    spec: LogprobSpec | None,
    masks: TokenMasks | None = None,
) -> None:
    batch, vocab_size = logits.shape
    state = BatchRows(batch, 1, _LEN, vocab_size, logits.device, eos_token_ids=[2])
    first = batch - num_wishing
    joins = [
        RowJoin(
            row=row,
            spec=RowSpec(
                sampling=SamplingParams(**(wish if row >= first else {})),
                extras=[] if spec is None else [spec.extra()],
            ),
            num_prompt=4,
            output_ids=np.full(5 + row % 3, 9, dtype=np.int32),
        )
        for row in range(batch)
    ]
    state.apply(joins, [])
    rows = np.arange(batch)
    positions = np.array([4 + len(join.output_ids) for join in joins], dtype=np.int64)
    Sampler(state).sample(logits, rows, positions, masks)
