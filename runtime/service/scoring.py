"""Scores labels by their probability as the next token of a text.

Each item becomes one prompt, and no token is generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from runtime.errors import InvalidRequest
from runtime.eventloop.body_errors import fields_of_type
from runtime.eventloop.json_body import work_out
from runtime.eventloop.large_body import MAX_NUMBERS
from runtime.eventloop.time_slices import Slices
from runtime.extras.logprobs.front import MAX_TOKEN_IDS
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.service.classes import require_scores
from runtime.service.context import ServiceContext
from runtime.service.generation import new_id
from runtime.service.prefills import prefill
from runtime.service.text_embeddings import embed
from runtime.text.encoding import check_num_chars, encode_prompts

MAX_ITEMS = 4096


class ScoreBody(msgspec.Struct, kw_only=True):
    """The body of `/v1/score`; unknown keys are ignored."""

    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int | list[int]] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: str | None = None
    # Fields of features that this server lacks: a neutral value passes, any other is refused.
    temperature: float | None = None
    return_token_logprobs: object | None = None
    return_pooled_hidden_states: object | None = None
    score_extraction_token: object | None = None
    query_embed_overrides: object | None = None
    item_embed_overrides: object | None = None


_UNSUPPORTED = fields_of_type(ScoreBody, object | None)


@dataclass(frozen=True)
class Scored:
    """The scores of a request's items.

    Attributes:
        scores: `[num_items][num_labels]`.
        prompt_tokens: number of tokens of all items together.
    """

    scores: list[list[float]]
    prompt_tokens: int


async def score(context: ServiceContext, body: ScoreBody, body_size: int = 0) -> Scored:
    """Score every item, or none if one is refused.

    Args:
        context: the server's context.
        body: the request.
        body_size: size of the body, bytes; a large body is processed outside the event loop.

    Raises:
        InvalidRequest: a value in `body` is wrong.
        PrefillAborted: an item was aborted.
    """
    _refuse_unsupported(body)
    prompts = await _prompts(context, body)
    if context.model.gives != "tokens":
        require_scores(context.model, "/v1/score")
        vectors = await embed(context, prompts) if prompts else []
        return Scored([each.numbers.tolist() for each in vectors], sum(map(len, prompts)))
    labels = await work_out(
        body_size,
        _labels,
        body.label_token_ids,
        len(prompts),
        context.client.limits.vocab_size,
    )
    found = await prefill(
        context,
        new_id("score", None),
        [
            (prompt, LogprobSpec(token_ids=wanted))
            for prompt, wanted in zip(prompts, labels, strict=True)
        ],
        param="items",
    )
    to_scores = _softmax if body.apply_softmax else _exp
    scores: list[list[float]] = []
    async with Slices() as slices:
        for each in found:
            scores.append(to_scores(each.following.id_values(0)))
            await slices.step()
    return Scored(scores, sum(map(len, prompts)))


def _exp(logprobs: list[float]) -> list[float]:
    return [math.exp(each) for each in logprobs]


def _softmax(logprobs: list[float]) -> list[float]:
    most = max(logprobs)
    parts = [math.exp(each - most) for each in logprobs]
    total = sum(parts)
    return [part / total for part in parts]


def _refuse_unsupported(body: ScoreBody) -> None:
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported by this server yet.", param=name)
    if body.temperature not in (None, 1.0):
        raise InvalidRequest(
            "temperature must be 1: scores are the model's own probabilities.", param="temperature"
        )


async def _prompts(context: ServiceContext, body: ScoreBody) -> list[list[int]]:
    items = [body.items] if isinstance(body.items, str) else body.items
    if items is None:
        raise InvalidRequest("items must be given.", param="items")
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"items may have at most {MAX_ITEMS} entries.", param="items")
    texts = [item for item in items if isinstance(item, str)]
    ids = [item for item in items if not isinstance(item, str)]
    query = body.query
    if (texts and ids) or (texts and isinstance(query, list)) or (ids and isinstance(query, str)):
        raise InvalidRequest(
            "query and items must both be texts or both be lists of token ids.", param="items"
        )
    if ids:
        head = query if isinstance(query, list) else []
        num_tokens = len(head) * len(ids) + sum(map(len, ids))
        if num_tokens > MAX_NUMBERS:
            raise InvalidRequest(
                f"The items, each with the query, may have at most {MAX_NUMBERS} tokens together, "
                f"got {num_tokens}.",
                param="items",
            )
        return await work_out(num_tokens, _joined, ids, head, bool(body.item_first))
    start = query if isinstance(query, str) else ""
    # The size is checked before the query is put in front of each item, because the prompts could
    # be a hundred times as long as the body.
    check_num_chars(len(start) * len(texts) + sum(map(len, texts)))
    prompts = [item + start if body.item_first else start + item for item in texts]
    return await encode_prompts(context.tokenizer, prompts, context.client.limits)


def _joined(ids: list[list[int]], head: list[int], item_first: bool) -> list[list[int]]:
    return [item + head if item_first else head + item for item in ids]


def _labels(
    given: list[int | list[int]] | None, num_items: int, vocab_size: int
) -> list[list[int]]:
    name = "label_token_ids"
    if not given:
        raise InvalidRequest(f"{name} must name at least one token id.", param=name)
    flat = [each for each in given if isinstance(each, int)]
    nested = [each for each in given if not isinstance(each, int)]
    if flat and nested:
        raise InvalidRequest(f"{name} must be a list of ids or a list of such lists.", param=name)
    if nested and len(nested) != num_items:
        raise InvalidRequest(
            f"{name} must have one list for each of the {num_items} items, got {len(nested)}.",
            param=name,
        )
    for labels in nested or [flat]:
        if not 1 <= len(labels) <= MAX_TOKEN_IDS:
            raise InvalidRequest(
                f"{name} must name 1 to {MAX_TOKEN_IDS} ids, got {len(labels)}.", param=name
            )
        for label in labels:
            if not 0 <= label < vocab_size:
                raise InvalidRequest(
                    f"{name} must be in [0, {vocab_size}), got {label}.", param=name
                )
        if len(set(labels)) != len(labels):
            raise InvalidRequest(f"{name} must not repeat an id.", param=name)
    return nested or [flat] * num_items
