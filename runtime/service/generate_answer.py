"""What `/generate` answers, as the description of the API shows it."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from runtime.extras.entropy.front import EntropyMeta
from runtime.extras.hidden_states.answer import HiddenMeta
from runtime.extras.logprobs.answer import LogprobMeta
from runtime.extras.routed_experts.front import RoutedMeta
from runtime.ipc.messages import FinishReason


class MetaInfo(LogprobMeta, HiddenMeta, EntropyMeta, RoutedMeta):
    """What is known of a sample beside its tokens; times come with its end, `dp_rank` of several.

    `image_tokens` are those of the prompt that stand for images, where it has any. Times:
    `e2e_latency` in seconds, `response_sent_to_client_ts` since 1970.
    """

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    image_tokens: NotRequired[int]
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    weight_version: str
    total_retractions: int
    dp_rank: NotRequired[int]
    e2e_latency: NotRequired[float]
    response_sent_to_client_ts: NotRequired[float]


class GenerateAnswer(TypedDict):
    """One sample; `text` needs a tokenizer, `index` is of streams with several."""

    text: NotRequired[str]
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    index: NotRequired[int]
