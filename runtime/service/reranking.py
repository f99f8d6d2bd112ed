"""Ranks documents for a query.

The model either scores pairs of texts (a cross-encoder), or generates text and is asked whether the
document answers the query, yes or no.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from runtime.errors import InvalidRequest
from runtime.requests.bounds import within
from runtime.service.classes import require_scores
from runtime.service.context import ServiceContext
from runtime.service.generation import new_id
from runtime.service.scoring import MAX_ITEMS, ScoreBody, score
from runtime.service.text_embeddings import (
    MAX_INPUTS,
    EmbeddingMeta,
    TextOptions,
    describe,
    embed,
)
from runtime.text.encoding import check_num_chars

# Writes the prompt that asks whether a document answers a query. The arguments are instruction,
# query and document.
AskPrompt = Callable[[str, str, str], Awaitable[str]]
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankBody(msgspec.Struct, kw_only=True):
    """The body of `/v1/rerank`; unknown keys are ignored."""

    query: str | list[dict[str, Any]]
    documents: list[str | list[dict[str, Any]]]
    model: str | None = None
    instruct: str | None = None
    top_n: Annotated[int, within(1)] | None = None
    return_documents: bool | None = None
    rid: str | list[str] | None = None


class RelevanceBody(msgspec.Struct, kw_only=True):
    """The body of `/rerank` and `/v2/rerank`, in the format of Jina and Cohere.

    Attributes:
        documents: texts, or objects with a `text`; objects are returned as they were sent.
    """

    query: str | list[dict[str, Any]]
    documents: list[str | dict[str, Any] | list[dict[str, Any]]]
    model: str | None = None
    instruct: str | None = None
    top_n: Annotated[int, within(1)] | None = None
    return_documents: bool | None = None
    rid: str | list[str] | None = None


class Ranked(TypedDict):
    """A document with its score; `meta_info` is absent if the model was asked for yes or no."""

    score: float
    index: int
    meta_info: EmbeddingMeta | None
    document: NotRequired[str]


class Relevant(TypedDict):
    """A document with its relevance; `index` is its position in the request."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, Any]]


class RelevanceUsage(TypedDict):
    """The number of tokens of all pairs of query and document together."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(TypedDict):
    """The API's version, which Cohere's clients read."""

    version: Literal["2"]


class BilledUnits(TypedDict):
    """What Cohere would bill for the answer: one search."""

    search_units: Literal[1]


class RelevanceMeta(TypedDict):
    """The part of an answer that only Cohere's clients read."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RelevanceAnswer(TypedDict):
    """The documents, the most relevant first, in the format of Jina and Cohere."""

    id: str
    object: Literal["list"]
    model: str
    results: list[Relevant]
    usage: RelevanceUsage
    meta: RelevanceMeta


@dataclass(frozen=True)
class _Scored:
    """One document's score.

    Attributes:
        index: the document's position in the request.
        score: the model's output.
        relevance: the score after the activation function that the model's folder names.
        meta_info: ids and times of the computation, from a model that scores pairs.
    """

    index: int
    score: float
    relevance: float
    meta_info: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Asked:
    """A checked request: the query, the documents, the instruction and the request ids.

    Attributes:
        route: the request's route, for error messages.
    """

    route: str
    query: str
    documents: list[str]
    instruct: str | None
    rid: str | list[str] | None


async def rerank(
    context: ServiceContext, body: RerankBody, ask: AskPrompt | None = None
) -> list[dict[str, Any]]:
    """Return the documents with their scores, the best first.

    Args:
        context: the service.
        body: the request.
        ask: writes the prompt with the chat template, for a model that generates text. `None` if
            the template does not ask for yes or no.

    Raises:
        InvalidRequest: a value in `body` is wrong, or the model cannot compare texts.
    """
    asked = _check(context, body, "/v1/rerank")
    ranked, _ = await _ranked(context, asked, ask)
    answers = []
    for each in ranked[: body.top_n]:
        answer: dict[str, Any] = {
            "score": each.score,
            "index": each.index,
            "meta_info": each.meta_info,
        }
        if body.return_documents is not False:
            answer["document"] = asked.documents[each.index]
        answers.append(answer)
    return answers


async def rank_by_relevance(
    context: ServiceContext,
    body: RelevanceBody,
    ask: AskPrompt | None = None,
    *,
    route: str,
    returns_documents: bool,
) -> RelevanceAnswer:
    """Rank documents as `rerank` does, with request and answer in the format of Jina and Cohere.

    Args:
        context: the service.
        body: the request.
        ask: writes the prompt with the chat template, for a model that generates text. `None` if
            the template does not ask for yes or no.
        route: the request's route, for error messages.
        returns_documents: whether the answer has the documents if the request does not say.

    Raises:
        InvalidRequest: for the reasons of `rerank`.
    """
    asked = _check(context, body, route)
    ranked, num_tokens = await _ranked(context, asked, ask)
    returns = returns_documents if body.return_documents is None else body.return_documents
    results: list[Relevant] = []
    for each in ranked[: body.top_n]:
        result: Relevant = {"index": each.index, "relevance_score": each.relevance}
        if returns:
            sent = body.documents[each.index]
            text = asked.documents[each.index]
            result["document"] = sent if isinstance(sent, dict) else {"text": text}
        results.append(result)
    return {
        "id": new_id("rerank", None),
        "object": "list",
        "model": body.model or context.served_model_name,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }


def _check(context: ServiceContext, body: RerankBody | RelevanceBody, route: str) -> _Asked:
    query = _text(body.query, "query")
    most = MAX_ITEMS if context.model.gives == "tokens" else MAX_INPUTS
    if not body.documents:
        raise InvalidRequest("documents must not be empty.", param="documents")
    if len(body.documents) > most:
        raise InvalidRequest(f"documents may have at most {most} entries.", param="documents")
    documents = [_document(each) for each in body.documents]
    # The query is put in front of each document, so all prompts together could be a thousand times
    # as long as the body.
    repeated = (len(query) + len(body.instruct or "")) * len(documents)
    check_num_chars(repeated + sum(map(len, documents)))
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest("top_n must be at least 1.", param="top_n")
    return _Asked(route, query, documents, body.instruct, body.rid)


async def _ranked(
    context: ServiceContext, asked: _Asked, ask: AskPrompt | None
) -> tuple[list[_Scored], int]:
    """Return all documents, the best first, and the number of tokens of all prompts."""
    if context.model.gives == "tokens":
        scored, num_tokens = await _ask_each(context, asked, ask)
    else:
        scored, num_tokens = await _score_pairs(context, asked)
    return sorted(scored, key=lambda each: -each.score), num_tokens


async def _score_pairs(context: ServiceContext, asked: _Asked) -> tuple[list[_Scored], int]:
    require_scores(context.model, asked.route)
    if context.model.output_size != 1:
        raise InvalidRequest(
            f"{asked.route} needs a model with one score; this one has {context.model.output_size} "
            "classes: use /v1/classify."
        )
    if asked.instruct:
        raise InvalidRequest(
            "instruct is for models that are asked in words; this one compares two texts.",
            param="instruct",
        )
    pairs = [(asked.query, document) for document in asked.documents]
    found = await embed(context, pairs, TextOptions(rid=asked.rid))
    activate = _sigmoid if context.model.score_activation == "sigmoid" else float
    scored = [
        _Scored(index, each.numbers[0], activate(each.numbers[0]), describe(each)["meta_info"])
        for index, each in enumerate(found)
    ]
    return scored, sum(each.prompt_tokens for each in found)


def _sigmoid(score: float) -> float:
    # The exponential of a large positive number would overflow.
    odds = math.exp(-abs(score))
    return 1 / (1 + odds) if score >= 0 else odds / (1 + odds)


async def _ask_each(
    context: ServiceContext, asked: _Asked, ask: AskPrompt | None
) -> tuple[list[_Scored], int]:
    """Return, for each document, the probability that the model answers yes rather than no."""
    if ask is None:
        raise InvalidRequest(
            f"{asked.route} needs a model that scores pairs of texts, or one whose chat template "
            f"asks for yes or no; this server's ({context.model.architecture}) generates text. For "
            "Qwen3-Reranker start it with --chat-template qwen3-reranker."
        )
    instruction = asked.instruct or DEFAULT_INSTRUCTION
    prompts: list[str | list[int]] = [
        await ask(instruction, asked.query, document) for document in asked.documents
    ]
    labels: list[int | list[int]] = [_only_id(context, word, asked.route) for word in ("yes", "no")]
    scored = await score(
        context, ScoreBody(items=prompts, label_token_ids=labels, apply_softmax=True)
    )
    # The score is a probability already, so it is also the relevance.
    found = [_Scored(index, numbers[0], numbers[0]) for index, numbers in enumerate(scored.scores)]
    return found, scored.prompt_tokens


def _only_id(context: ServiceContext, word: str, route: str) -> int:
    ids = context.tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequest(
            f"{route} needs {word!r} to be one token of the model's; it has {len(ids)}."
        )
    return ids[0]


def _document(given: str | dict[str, Any] | Sequence[dict[str, Any]]) -> str:
    if not isinstance(given, dict):
        return _text(given, "documents")
    text = given.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(
            "documents: an object must have its text in the key text.", param="documents"
        )
    return _text(text, "documents")


def _text(given: str | Sequence[dict[str, Any]], name: str) -> str:
    """Return a text, or the texts of content parts, one a line.

    Args:
        given: a text, or content parts in the form of a chat message.
        name: the request's field, for error messages.

    Raises:
        InvalidRequest: the text is blank, or a part is not a text.
    """
    if not isinstance(given, str):
        parts = [part.get("text") if part.get("type") == "text" else None for part in given]
        if not all(isinstance(part, str) for part in parts):
            raise InvalidRequest(
                f"{name}: parts must be of type text; this model sees no images.", param=name
            )
        given = "\n".join(map(str, parts))
    if not given.strip():
        raise InvalidRequest(f"{name} must not be blank.", param=name)
    return given
