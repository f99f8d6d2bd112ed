"""Bounds the size of the answer to one request, before any of it is computed.

The time to compute a token limits the number of tokens in an answer. It does not limit what comes
with the tokens. This module counts that: for example, a thousand log-probabilities or a hidden
state for each token, or the prompt once for each sample.

For an HTTP request, all prompts and samples are counted together. The offline engine counts each
sample alone, because its answers are in the caller's own memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from runtime.client.admission import EngineLimits
from runtime.client.front_extras import front_extra
from runtime.client.generation_stream import GenerationInput
from runtime.errors import InvalidRequest

# The most numbers besides tokens in an answer, of four bytes each: 128 MiB. For comparison, 65,536
# tokens with 20 log-probabilities each have 2.6 million numbers (id and log-probability).
MAX_NUMBERS = 2**25
# The most tokens of a request's prompts, 256 MiB. Each prompt counts once for each of its samples.
MAX_PROMPT_TOKENS = 2**26
# The most bytes of a request's images. An image counts once for each sample that uses it, because
# it is sent to the worker with each sample.
MAX_PIXEL_BYTES = 2**29

_EMBEDS = "input_embeds"


def check_answer_size(inputs: Sequence[GenerationInput], limits: EngineLimits) -> None:
    """Refuse the samples of one request if they, or their answers, might be too large together.

    Raises:
        InvalidRequest: the samples or their answers exceed `MAX_NUMBERS`, `MAX_PROMPT_TOKENS` or
            `MAX_PIXEL_BYTES`; the message has the bound and the request's own number.
    """
    num_prompt = sum(len(item.input_ids) for item in inputs)
    if num_prompt > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"The prompts of a request, each counted for each of its n samples, may have at most "
            f"{MAX_PROMPT_TOKENS} tokens together, got {num_prompt}: send several requests."
        )
    num_bytes = sum(item.spec.num_pixel_bytes for item in inputs)
    if num_bytes > MAX_PIXEL_BYTES:
        raise InvalidRequest(
            "The images of a request, each counted for each of the samples that see it, may have "
            f"at most {MAX_PIXEL_BYTES >> 20} MiB as they are scaled, got {num_bytes >> 20}: send "
            "several requests."
        )
    weighing = [item for item in inputs if item.spec.extras or item.spec.input_embeds]
    if not weighing:
        return
    numbers: Counter[str] = Counter()
    for item in weighing:
        _count(numbers, item, limits)
    total = numbers.total()
    if total <= MAX_NUMBERS:
        return
    (name, most), *_ = numbers.most_common(1)
    field, advice = _EMBEDS, "send fewer or shorter prompts"
    if name != _EMBEDS:
        field, advice = front_extra(name).field, front_extra(name).advice
    raise InvalidRequest(
        f"A request may have at most {MAX_NUMBERS} numbers beside its tokens, and this one's "
        f"{len(inputs)} samples might come to {total}, {most} of them {name}: {advice}, ask for "
        "fewer samples, or set max_new_tokens lower.",
        param=field,
    )


def _count(numbers: Counter[str], item: GenerationInput, limits: EngineLimits) -> None:
    num_prompt = min(len(item.input_ids), limits.max_req_len)
    num_output = limits.max_req_len - num_prompt
    if item.spec.sampling.max_new_tokens is not None:
        num_output = min(num_output, item.spec.sampling.max_new_tokens)
    for each in item.spec.extras:
        extra = front_extra(each.name)
        numbers[each.name] += extra.num_numbers(each, num_prompt, num_output, limits)
    numbers[_EMBEDS] += len(item.spec.input_embeds) // 4
