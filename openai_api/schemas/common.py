"""Fields that chat and text completions share, and the refusal of unsupported fields."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from openai_api.schemas.neutral import neutral
from runtime.client.session_store import SessionParams
from runtime.errors import InvalidRequest
from runtime.extras.hidden_states.front import LAST, NAME, HiddenSwitch, check_offered
from runtime.requests.bounds import at_most
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.sampling_params import (
    Bias,
    FrequencyPenalty,
    Int64,
    MinP,
    NumSamples,
    NumTokens,
    PresencePenalty,
    RepetitionPenalty,
    StopString,
    StopStrings,
    Temperature,
    TokenId,
    TopKOrOff,
    TopPOrZero,
)

MAX_RID_CHARS = 256
# The only service tier, reported whatever a request's `service_tier` is.
ONLY_TIER = "default"
MAX_SALT_CHARS = 256
Rid = Annotated[str, at_most(chars=MAX_RID_CHARS)]
LoraName = Annotated[str, at_most(chars=MAX_RID_CHARS)]
Salt = Annotated[str, at_most(chars=MAX_SALT_CHARS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports besides text.

    Attributes:
        include_usage: whether an event at the end, without choices, has the usage.
        continuous_usage_stats: whether every event has the usage so far.
        include_obfuscation: whether every event has random characters, which hide the length of
            its text.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields of sampling, stopping and other settings; null always means the default.

    Unsupported fields are declared too, so that a request that uses one is refused. Otherwise its
    answer would silently lack the feature; see `refuse_unsupported`.
    """

    model: str | None = None
    user: Annotated[str | None, neutral("users are not distinguished")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Temperature | None = None
    top_p: TopPOrZero | None = None
    top_k: TopKOrOff | None = None
    min_p: MinP | None = None
    n: NumSamples | None = None
    seed: Int64 | None = None
    frequency_penalty: FrequencyPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_regex: str | list[str] | None = None
    min_tokens: NumTokens | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    priority: Int64 | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    # Fields of other servers that set a constraint; see `openai_api.constraints`.
    grammar: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: dict[str, Any] | None = None
    lora_path: LoraName | None = None
    session_params: SessionParams | None = None
    custom_params: Annotated[dict[str, Any] | None, neutral("no logit processors run here")] = None
    custom_logit_processor: Any = None
    return_hidden_states: HiddenSwitch | None = None
    return_routed_experts: Any = None
    return_cached_tokens_details: Any = None
    return_token_ids: Any = None
    return_prompt_token_ids: Any = None
    return_meta_info: Any = None
    bootstrap_host: Any = None
    bootstrap_room: Any = None


@functools.cache
def _getter(names: tuple[str, ...]) -> Callable[[GenerationFields], tuple[Any, ...]]:
    return attrgetter(*names)


def refuse_unsupported(request: GenerationFields, names: tuple[str, ...]) -> None:
    """Refuse a request that sets one of the fields `names` to more than an empty value.

    Raises:
        InvalidRequest: the first such field.
    """
    if not any(_getter(names)(request)):
        return
    for name in names:
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported by this server yet.", param=name)


def check_stream_options(request: GenerationFields) -> None:
    """Refuse stream options without a stream.

    Raises:
        InvalidRequest: `stream_options` is set and `stream` is not.
    """
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream.", param="stream_options")


def hidden_extras(request: GenerationFields, offered: frozenset[str]) -> list[ExtraSpec]:
    """Return the extra that reports hidden states, if requested: those of the last token only.

    Raises:
        InvalidRequest: hidden states are requested, but the server was started without them.
    """
    if not request.return_hidden_states:
        return []
    check_offered(NAME in offered)
    return [LAST]


def session_of(request: GenerationFields) -> SessionParams | None:
    """Return the request's session parameters; None if it is not part of a session."""
    return None if request.session_params is None else request.session_params.or_none()


def check_rid(rid: str | None) -> None:
    """Check a `rid`, which appears in logs and answers.

    Raises:
        InvalidRequest: the `rid` is empty, too long, or has characters that are not printable
            ASCII.
    """
    if rid is None:
        return
    if not 0 < len(rid) <= MAX_RID_CHARS or not (rid.isascii() and rid.isprintable()):
        raise InvalidRequest(
            f"rid must be 1 to {MAX_RID_CHARS} printable ASCII characters.", param="rid"
        )


def cache_namespace(request: GenerationFields) -> str:
    """Return the prefix-cache namespace that the request names; the same as in `/generate`.

    Raises:
        InvalidRequest: a part of the namespace is too long.
    """
    key, salt = request.extra_key or "", request.cache_salt or ""
    for name, value in (("extra_key", key), ("cache_salt", salt)):
        if len(value) > MAX_SALT_CHARS:
            raise InvalidRequest(
                f"{name} may have at most {MAX_SALT_CHARS} characters.", param=name
            )
    # The length in front keeps key "ab" with salt "c" apart from key "a" with salt "bc".
    return f"{len(key)}:{key}{salt}" if key or salt else ""
