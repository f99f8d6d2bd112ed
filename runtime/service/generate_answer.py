"""Types of the answer of `/generate`, from which the API's description is generated."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from runtime.extras.entropy.front import EntropyMeta
from runtime.extras.hidden_states.answer import HiddenMeta
from runtime.extras.logprobs.answer import LogprobMeta
from runtime.extras.routed_experts.front import RoutedMeta
from runtime.ipc.messages import FinishReason


class MetaInfo(LogprobMeta, HiddenMeta, EntropyMeta, RoutedMeta):
    """Information about a sample besides its tokens.

    The two times are set when the sample ends: `e2e_latency` in seconds, and
    `response_sent_to_client_ts` in seconds since 1970. `dp_rank` is set if the server has several
    replicas. `image_tokens` is set if the prompt has images: the number of its tokens that stand
    for images.
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
    """One sample of an answer.

    `text` is absent if the server has no tokenizer. `index` is set in streams with several samples.
    """

    text: NotRequired[str]
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    index: NotRequired[int]
