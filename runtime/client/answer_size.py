"""What the answer to one request may weigh, found out before any of it is computed.

A token costs the GPU as much as it weighs. What is counted here multiplies it: a thousand
log-probabilities a token, a hidden state a token, a prompt once for each of its samples.

HTTP requests are counted as a whole, with all their prompts and samples. In the offline engine each
sample is counted for itself: the memory is the caller's, who gets the lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.client.admission import EngineLimits
from runtime.client.generation import GenerationInput
from runtime.errors import InvalidRequest
from runtime.messages import HiddenMode, LogprobSpec

# Numbers of four bytes, 128 MiB: 65,536 tokens with 20 log-probabilities each are 2.6 million.
MAX_NUMBERS = 2**25
# Tokens of a request's prompts, each prompt counted once for each of its samples, 256 MiB.
MAX_PROMPT_TOKENS = 2**26


def check_answer_size(inputs: Sequence[GenerationInput], limits: EngineLimits) -> None:
    """Refuse the samples of one request if their answers might weigh too much together.

    Raises:
        InvalidRequest: more than `MAX_NUMBERS` or `MAX_PROMPT_TOKENS`; it tells the bound and what
            the request came to.
    """
    num_prompt = sum(len(item.input_ids) for item in inputs)
    if num_prompt > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"The prompts of a request, each counted for each of its n samples, may have at most "
            f"{MAX_PROMPT_TOKENS} tokens together, got {num_prompt}: send several requests."
        )
    numbers = _Numbers()
    for item in inputs:
        if item.logprobs is not None or item.hidden_states or item.input_embeds:
            numbers.add(item, limits)
    numbers.check(len(inputs))


def check_sample_size(item: GenerationInput, limits: EngineLimits) -> None:
    """Like `check_answer_size` for one sample.

    Raises:
        InvalidRequest: more than `MAX_NUMBERS`.
    """
    numbers = _Numbers()
    numbers.add(item, limits)
    numbers.check(1)


class _Numbers:
    def __init__(self) -> None:
        self._logprobs = 0
        self._hidden = 0
        self._embeds = 0

    def add(self, item: GenerationInput, limits: EngineLimits) -> None:
        num_prompt = min(len(item.input_ids), limits.max_req_len)
        num_output = limits.max_req_len - num_prompt
        if item.sampling.max_new_tokens is not None:
            num_output = min(num_output, item.sampling.max_new_tokens)
        if item.logprobs is not None:
            self._logprobs += num_logprob_numbers(item.logprobs, num_prompt, num_output)
        if item.hidden_states:
            self._hidden += _num_hidden(item.hidden_states, num_prompt + num_output, limits)
        self._embeds += len(item.input_embeds) // 4

    def check(self, num_samples: int) -> None:
        total = self._logprobs + self._hidden + self._embeds
        if total <= MAX_NUMBERS:
            return
        if self._logprobs >= max(self._hidden, self._embeds):
            param, advice = "top_logprobs_num", "ask for fewer log-probabilities at each position"
        elif self._hidden >= self._embeds:
            param, advice = "return_hidden_states", 'ask for "last" hidden states only'
        else:
            param, advice = "input_embeds", "send fewer or shorter prompts"
        raise InvalidRequest(
            f"The answer to a request may hold at most {MAX_NUMBERS} numbers, and this one's "
            f"{num_samples} samples might come to {total} ({self._logprobs} of log-probabilities "
            f"and their ids, {self._hidden} of hidden states, {self._embeds} of embeddings that "
            f"were sent): {advice}, ask for fewer samples, or set max_new_tokens lower.",
            param=param,
        )


def num_logprob_numbers(spec: LogprobSpec, num_prompt: int, num_output: int) -> int:
    """Numbers that a sample's log-probabilities come to; the output's own tokens' are free."""
    num_reported = num_prompt - spec.start_len if 0 <= spec.start_len <= num_prompt else 0
    # The largest ones come with their ids, those of ids that were asked for without.
    num_each = 2 * spec.top_num + len(spec.token_ids)
    return (num_reported + num_output) * num_each + 2 * num_reported


def _num_hidden(mode: HiddenMode, num_tokens: int, limits: EngineLimits) -> int:
    return limits.hidden_size * (1 if mode == "last" else num_tokens)
