"""The body of `/generate`: its fields, its checks, and the list of samples that it requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec

from runtime.client.front_extras import Asked, front_extras
from runtime.client.replica_router import wanted_rank
from runtime.client.session_store import SessionParams
from runtime.errors import InvalidRequest
from runtime.eventloop.body_errors import fields_of_type
from runtime.eventloop.json_body import work_out
from runtime.extras.hidden_states.front import HiddenSwitch
from runtime.extras.logprobs.front import MAX_TOP_LOGPROBS
from runtime.media.image_loader import NO_VISION, NamedItem
from runtime.media.image_source import ImageData
from runtime.media.media_policy import MAX_IMAGES_OF_BATCH
from runtime.requests.bounds import at_most, within
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.random_hex import random_hex
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import (
    INT64_MAX,
    MAX_SAMPLES,
    Int64,
    SamplingFields,
    TokenId,
    check_priority,
    nth_sample,
    resolve_sampling,
)
from runtime.service.input_embeds import Features, Row, read_embeds

DEFAULT_MAX_NEW_TOKENS = 128
MAX_BATCH = 4096
MAX_LABEL_CHARS = 256
Label = Annotated[str, at_most(chars=MAX_LABEL_CHARS)]
StartLen = Annotated[int, within(-1, INT64_MAX)]
NumTop = Annotated[int, within(0, MAX_TOP_LOGPROBS)]
_LOOKED_AT = 64 * 1024
_IMAGES = "image_data"


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of `/generate`; unknown keys are ignored."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: list[Row] | None = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None
    stream: bool | None = None
    rid: Label | list[Label] | None = None
    extra_key: Label | list[Label | None] | None = None
    cache_salt: Label | list[Label | None] | None = None
    priority: Int64 | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen | None] | None = None
    top_logprobs_num: NumTop | list[NumTop | None] | None = None
    token_ids_logprob: list[TokenId | list[TokenId] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    log_metrics: bool | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    return_hidden_states: HiddenSwitch | list[HiddenSwitch] | None = None
    return_entropy: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, within(0, INT64_MAX)] | None = None
    session_params: SessionParams | None = None
    session_id: str | None = None
    image_data: ImageData | None = None
    lora_path: Label | list[Label | None] | None = None
    # Fields of features that this server lacks: a neutral value passes, any other is refused.
    video_data: object | None = None
    audio_data: object | None = None
    return_bytes: object | None = None
    return_sampling_mask: object | None = None
    custom_logit_processor: object | None = None
    max_thinking_tokens: object | None = None
    background: object | None = None
    bootstrap_host: object | None = None
    bootstrap_port: object | None = None
    bootstrap_room: object | None = None


UNSUPPORTED_FIELDS = fields_of_type(GenerateBody, object | None)
Prompts = list[str] | list[list[int]]


@dataclass(frozen=True)
class Sample:
    """One output that a request asks for.

    Attributes:
        prompt_index: index of the prompt that the output continues.
        spec: what the engine needs to know of the sample, without the prompt.
    """

    prompt_index: int
    spec: RequestSpec


@dataclass(frozen=True)
class GeneratePlan:
    """The samples of a request, and the prompts that they continue.

    Attributes:
        prompts: texts, or lists of token ids. With `input_embeds` the ids only have the right
            length; their values have no meaning.
        samples: the samples of the first prompt, then those of the second, and so on.
        is_single: whether the answer is one object instead of a list.
        stream: whether the answer is streamed.
        return_prompt_token_ids: whether the answer repeats the prompt's token ids.
        is_recorded: whether metrics and the request log count the request.
        session: the session that the prompts continue, if any.
        images: the images of each prompt, in the order of their positions; empty if no prompt has
            one.
        adapters: the name of each prompt's adapter (LoRA), if it has one.
    """

    prompts: Prompts
    samples: list[Sample]
    is_single: bool
    stream: bool
    return_prompt_token_ids: bool
    is_recorded: bool
    session: SessionParams | None = None
    images: Sequence[list[NamedItem]] = ()
    adapters: Sequence[str | None] = ()


def plan_generate(
    body: GenerateBody,
    preferred: dict[str, object],
    vocab_size: int,
    max_batch: int | None = MAX_BATCH,
    features: Features = Features(),
) -> GeneratePlan:
    """Check a body as far as possible without a tokenizer, and list its samples.

    Args:
        body: the decoded body.
        preferred: sampling values for keys that the request omits.
        vocab_size: number of logits of a token, the bound of token ids.
        max_batch: the most samples of one request; `None` for the offline engine, whose caller may
            use all its memory.
        features: the optional features that this server offers.

    Raises:
        InvalidRequest: the first error, with the name of its field.
    """
    if body.session_params is not None:
        body.session_params = body.session_params.or_none()
    _refuse_unsupported(body)
    prompts, embeds, is_one_prompt = _prompts(body, features)
    images = _images(body, len(prompts), is_one_prompt, features)
    fields = _sampling_fields(body, len(prompts))
    num_samples = {each.n or 1 for each in fields}
    if len(num_samples) > 1:
        raise InvalidRequest("n must be the same for all prompts of a request.", param="n")
    n = num_samples.pop()
    # n is bounded before prompts are unrolled, so that a huge n costs no time.
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidRequest(f"n must be in [1, {MAX_SAMPLES}], got {n}.", param="n")
    if max_batch is not None and len(prompts) * n > max_batch:
        raise InvalidRequest(
            f"A request may ask for at most {max_batch} outputs, "
            f"got {len(prompts)} prompts times n={n}."
        )
    rids = _rids(body.rid, len(prompts), is_one_prompt, n)
    namespaces = _namespaces(body, len(prompts))
    extras = _extras(body, Asked(len(prompts), vocab_size, n, embeds is None, features.offered))
    defaults = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, **preferred}
    params = [resolve_sampling(each, defaults, vocab_size) for each in fields]
    priority = check_priority(body.priority)
    dp_rank = wanted_rank(body.routed_dp_rank, body.data_parallel_rank)
    samples: list[Sample] = []
    for prompt_index in range(len(prompts)):
        which = prompt_index if len(params) > 1 else 0
        limit = fields[which].max_new_tokens
        samples.extend(
            Sample(
                prompt_index,
                RequestSpec(
                    row=RowSpec(
                        sampling=nth_sample(params[which], index), extras=extras[prompt_index]
                    ),
                    rid=rids[prompt_index * n + index],
                    stream=bool(body.stream),
                    explicit_max_new_tokens=isinstance(limit, int),
                    cache_namespace=namespaces[prompt_index],
                    priority=priority,
                    input_embeds=b"" if embeds is None else embeds[prompt_index],
                    dp_rank=dp_rank,
                ),
            )
            for index in range(n)
        )
    return GeneratePlan(
        prompts=prompts,
        samples=samples,
        is_single=is_one_prompt and n == 1,
        stream=bool(body.stream),
        return_prompt_token_ids=bool(body.return_prompt_token_ids),
        is_recorded=body.log_metrics is not False,
        session=body.session_params,
        images=images,
        adapters=_adapters(body, len(prompts)),
    )


def _adapters(body: GenerateBody, num_prompts: int) -> list[str | None]:
    given = body.lora_path
    if not isinstance(given, list):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"lora_path must have one entry for each of the {num_prompts} prompts (a name or "
            f"null), got {len(given)}.",
            param="lora_path",
        )
    return list(given)


def _images(
    body: GenerateBody, num_prompts: int, is_one_prompt: bool, features: Features
) -> list[list[NamedItem]]:
    """Return each prompt's images; empty if no prompt has one."""
    given = body.image_data
    if not isinstance(given, list):
        # A single image belongs to every prompt of the batch.
        each = _named([given], _IMAGES) if given else []
        found = [each] * num_prompts
    elif is_one_prompt:
        nested = given[0] if len(given) == 1 else None
        found = [_named(nested if isinstance(nested, list) else given, _IMAGES)]
    elif len(given) == num_prompts:
        found = [
            _named(each if isinstance(each, list) else [each], f"{_IMAGES}[{index}]")
            for index, each in enumerate(given)
        ]
    elif any(given):
        raise InvalidRequest(
            f"{_IMAGES} must have one entry for each of the {num_prompts} prompts (an image, a "
            f"list of images or null), got {len(given)}.",
            param=_IMAGES,
        )
    else:
        found = []
    if not any(found):
        return []
    # An image that several prompts share counts once.
    num_images = len({id(named.item) for each in found for named in each})
    _check_images(body, num_images, features)
    return found


def _named(items: Sequence[Any], param: str) -> list[NamedItem]:
    for item in items:
        if isinstance(item, list):
            raise InvalidRequest(
                f"{param}: the images of one prompt are an image, or a list of images.",
                param=_IMAGES,
            )
    return [NamedItem(item, param) for item in items if item]


def _check_images(body: GenerateBody, num_images: int, features: Features) -> None:
    if not features.sees:
        raise InvalidRequest(f"{_IMAGES}: {NO_VISION}.", param=_IMAGES)
    if body.session_params is not None:
        raise InvalidRequest(f"{_IMAGES} cannot come with a session.", param=_IMAGES)
    if body.text is None and body.input_ids is None:
        raise InvalidRequest(f"{_IMAGES} needs text or input_ids.", param=_IMAGES)
    if num_images > MAX_IMAGES_OF_BATCH:
        raise InvalidRequest(
            f"A request may bring at most {MAX_IMAGES_OF_BATCH} images, got {num_images}.",
            param=_IMAGES,
        )


def _extras(body: GenerateBody, asked: Asked) -> list[list[ExtraSpec]]:
    """Return, for each prompt, the extra outputs (log-probabilities, ...) of its samples."""
    found: list[list[ExtraSpec]] = [[] for _ in range(asked.num_prompts)]
    for extra in front_extras():
        for mine, spec in zip(found, extra.plan(body, asked) or (), strict=False):
            if spec is not None:
                mine.append(spec)
    return found


def _is_neutral(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_neutral(each) for each in value)
    return value is None or value is False or value in ("", -1) or value == {}


def _refuse_unsupported(body: GenerateBody) -> None:
    for name in UNSUPPORTED_FIELDS:
        value = getattr(body, name)
        if value is not None and not _is_neutral(value):
            raise InvalidRequest(f"{name} is not supported by this server yet.", param=name)
    if body.session_id is not None and body.session_params is not None:
        raise InvalidRequest(
            "session_id is a label; it cannot be sent together with session_params.",
            param="session_id",
        )


def _prompts(body: GenerateBody, features: Features) -> tuple[Prompts, list[bytes] | None, bool]:
    """Return the prompts, their embeddings if given, and whether there is just one prompt.

    With embeddings, the prompts are token ids without a meaning.
    """
    if None not in (body.text, body.input_ids, body.input_embeds):
        raise InvalidRequest(
            "text, input_ids and input_embeds cannot all be given.", param="input_embeds"
        )
    if body.text is not None:
        if isinstance(body.text, str):
            return [body.text], None, True
        if not body.text:
            raise InvalidRequest("text cannot be an empty list.", param="text")
        return body.text, None, False
    if body.input_ids is not None:
        ids, is_one = _ids(body.input_ids, may_be_empty=body.session_params is not None)
        return ids, None, is_one
    if body.input_embeds is None:
        raise InvalidRequest("One of text, input_ids and input_embeds must be given.", param="text")
    if body.session_params is not None:
        raise InvalidRequest("A session takes text or input_ids.", param="input_embeds")
    if body.return_prompt_token_ids:
        raise InvalidRequest("input_embeds have no token ids.", param="return_prompt_token_ids")
    embeds, is_one = read_embeds(body.input_embeds, features)
    row_bytes = features.hidden_size * 4
    return [[0] * (len(each) // row_bytes) for each in embeds], embeds, is_one


def _ids(ids: list[int | list[int]], *, may_be_empty: bool) -> tuple[list[list[int]], bool]:
    if not ids and not may_be_empty:
        raise InvalidRequest("input_ids cannot be empty.", param="input_ids")
    kinds = set(map(type, ids[:_LOOKED_AT]))
    for begin in range(_LOOKED_AT, len(ids), _LOOKED_AT):
        # The ids are checked in parts, because one check of all would hold the GIL until its end.
        kinds.update(map(type, ids[begin : begin + _LOOKED_AT]))
    if all(issubclass(kind, int) for kind in kinds):
        return [cast("list[int]", ids)], True
    if kinds != {list}:
        raise InvalidRequest(
            "input_ids must be a list of integers or a list of such lists.", param="input_ids"
        )
    return cast("list[list[int]]", ids), False


def _sampling_fields(body: GenerateBody, num_prompts: int) -> list[SamplingFields]:
    given = body.sampling_params
    if not isinstance(given, list):
        return [given or SamplingFields()]
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"sampling_params must have one entry for each of the {num_prompts} prompts, "
            f"got {len(given)}.",
            param="sampling_params",
        )
    return given


def _rids(rid: str | list[str] | None, num_prompts: int, is_one_prompt: bool, n: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != num_prompts:
            raise InvalidRequest(
                f"rid must have one entry for each of the {num_prompts} prompts, got {len(rid)}.",
                param="rid",
            )
        rids = rid
    elif rid is None:
        rids = []
    elif is_one_prompt:
        rids = [rid]
    else:
        rids = [f"{rid}_{index}" for index in range(num_prompts)]
    for each in rids:
        if not each or len(each) > MAX_LABEL_CHARS or not each.isprintable():
            raise InvalidRequest(
                f"rid must be 1 to {MAX_LABEL_CHARS} printable characters.", param="rid"
            )
    if len(set(rids)) != len(rids):
        raise InvalidRequest("rid must not repeat within a request.", param="rid")
    if not rids or n > 1:
        return [random_hex(16) for _ in range(num_prompts * n)]
    return rids


def _namespaces(body: GenerateBody, num_prompts: int) -> list[str]:
    if body.extra_key is None and body.cache_salt is None:
        return [""] * num_prompts
    columns = []
    for name, given in (("extra_key", body.extra_key), ("cache_salt", body.cache_salt)):
        values = given if isinstance(given, list) else [given] * num_prompts
        if len(values) != num_prompts:
            raise InvalidRequest(
                f"{name} must have one entry for each of the {num_prompts} prompts, "
                f"got {len(values)}.",
                param=name,
            )
        if any(len(value or "") > MAX_LABEL_CHARS for value in values):
            raise InvalidRequest(
                f"{name} may have at most {MAX_LABEL_CHARS} characters.", param=name
            )
        columns.append([value or "" for value in values])
    # The length in front keeps key "ab" with salt "c" apart from key "a" with salt "bc".
    return [
        f"{len(key)}:{key}{salt}" if key or salt else "" for key, salt in zip(*columns, strict=True)
    ]


async def plan_body(
    body: GenerateBody,
    body_size: int,
    preferred: dict[str, object],
    vocab_size: int,
    features: Features,
) -> GeneratePlan:
    """Run `plan_generate`, outside the event loop if the body is large.

    Args:
        body: the decoded body.
        body_size: its size, bytes.
        preferred: sampling values for keys that the request omits.
        vocab_size: number of logits of a token, the bound of token ids.
        features: the optional features that this server offers.
    """
    num_prompts = 1
    for each in (body.text, body.input_ids, body.sampling_params):
        if isinstance(each, list) and each and not isinstance(each[0], int):
            num_prompts = max(num_prompts, len(each))
    return await work_out(
        # Checking a prompt's parameters takes as long as checking a kilobyte of the body.
        max(body_size, num_prompts * 1024),
        plan_generate,
        body,
        preferred,
        vocab_size,
        features=features,
    )
