"""How well documents answer a query: by a model that scores pairs, or one that says yes or no."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from runtime.client.tokenization import check_num_chars
from runtime.errors import InvalidRequest
from runtime.requests.bounds import within
from runtime.service.classes import require_scores
from runtime.service.context import ServiceContext
from runtime.service.scoring import MAX_ITEMS, ScoreBody, score
from runtime.service.text_embeddings import (
    MAX_INPUTS,
    EmbeddingMeta,
    TextOptions,
    describe,
    embed,
)

# Writes the prompt that asks whether a document answers a query: instruction, query, document.
AskPrompt = Callable[[str, str, str], Awaitable[str]]
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankBody(msgspec.Struct, kw_only=True):
    """`/v1/rerank` as it arrives; keys that are not listed here are ignored."""

    query: str | list[dict[str, Any]]
    documents: list[str | list[dict[str, Any]]]
    instruct: str | None = None
    top_n: Annotated[int, within(1)] | None = None
    return_documents: bool = True
    rid: str | list[str] | None = None


class Ranked(TypedDict):
    """A document with its score; `meta_info` of a model that scores pairs."""

    score: float
    index: int
    meta_info: EmbeddingMeta | None
    document: NotRequired[str]


async def rerank(
    context: ServiceContext, body: RerankBody, ask: AskPrompt | None = None
) -> list[dict[str, Any]]:
    """The documents with their scores, the best first.

    Args:
        context: the service.
        body: the request.
        ask: for a model that generates text: what its chat template writes; `None` where that asks
            for no yes or no.

    Raises:
        InvalidRequest: something in `body` is wrong, or the model cannot compare texts.
    """
    query = _text(body.query, "query")
    most = MAX_ITEMS if context.model.gives == "tokens" else MAX_INPUTS
    if not body.documents:
        raise InvalidRequest("documents must not be empty.", param="documents")
    if len(body.documents) > most:
        raise InvalidRequest(f"documents may have at most {most} entries.", param="documents")
    documents = [_text(each, "documents") for each in body.documents]
    # Each gets the query: together that could be a thousand times what was sent.
    repeated = (len(query) + len(body.instruct or "")) * len(documents)
    check_num_chars(repeated + sum(map(len, documents)))
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest("top_n must be at least 1.", param="top_n")
    if context.model.gives == "tokens":
        scored = await _ask_each(context, body, query, documents, ask)
    else:
        scored = await _score_pairs(context, body, query, documents)
    answers = []
    for index, (number, meta_info) in enumerate(scored):
        answer: dict[str, Any] = {"score": number, "index": index, "meta_info": meta_info}
        if body.return_documents:
            answer["document"] = documents[index]
        answers.append(answer)
    answers.sort(key=lambda answer: -float(answer["score"]))
    return answers[: body.top_n]


async def _score_pairs(
    context: ServiceContext, body: RerankBody, query: str, documents: Sequence[str]
) -> list[tuple[float, dict[str, Any] | None]]:
    require_scores(context.model, "/v1/rerank")
    if context.model.output_size != 1:
        raise InvalidRequest(
            f"/v1/rerank needs a model with one score; this one has {context.model.output_size} "
            "classes: use /v1/classify."
        )
    if body.instruct:
        raise InvalidRequest(
            "instruct is for models that are asked in words; this one compares two texts.",
            param="instruct",
        )
    pairs = [(query, document) for document in documents]
    found = await embed(context, pairs, TextOptions(rid=body.rid))
    return [(each.numbers[0], describe(each)["meta_info"]) for each in found]


async def _ask_each(
    context: ServiceContext,
    body: RerankBody,
    query: str,
    documents: Sequence[str],
    ask: AskPrompt | None,
) -> list[tuple[float, dict[str, Any] | None]]:
    """Each document's probability of yes against no, right after the prompt."""
    if ask is None:
        raise InvalidRequest(
            "/v1/rerank needs a model that scores pairs of texts, or one whose chat template asks "
            f"for yes or no; this server's ({context.model.architecture}) generates text. For "
            "Qwen3-Reranker start it with --chat-template qwen3-reranker."
        )
    instruction = body.instruct or DEFAULT_INSTRUCTION
    prompts: list[str | list[int]] = [
        await ask(instruction, query, document) for document in documents
    ]
    labels = [_only_id(context, "yes"), _only_id(context, "no")]
    scored = await score(
        context, ScoreBody(items=prompts, label_token_ids=[*labels], apply_softmax=True)
    )
    return [(numbers[0], None) for numbers in scored.scores]


def _only_id(context: ServiceContext, word: str) -> int:
    ids = context.tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequest(
            f"/v1/rerank needs {word!r} to be one token of the model's; it has {len(ids)}."
        )
    return ids[0]


def _text(given: str | Sequence[dict[str, Any]], name: str) -> str:
    """A text, or the texts of content parts, one a line.

    Raises:
        InvalidRequest: blank, or a part that is no text.
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
