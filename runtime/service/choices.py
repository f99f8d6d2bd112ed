"""Scores several continuations of one prompt by the log-probabilities of their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

import msgspec

from runtime.errors import InvalidRequest
from runtime.eventloop.json_body import work_out
from runtime.eventloop.large_body import MAX_NUMBERS
from runtime.extras.logprobs.answer import TripleBody
from runtime.extras.logprobs.front import MAX_TOKEN_IDS
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.bounds import at_most
from runtime.service.context import ServiceContext
from runtime.service.generation import new_id
from runtime.service.prefills import Prefill, prefill
from runtime.text.encoding import check_num_chars, encode_prompts, encode_texts


@dataclass(slots=True)
class _Run:
    ids: list[int]
    # Maps each token id whose log-probability is requested at every position of this run to its
    # index in that request. These ids are the last tokens of the scored sequences.
    labels: dict[int, int] = field(default_factory=dict)


class ChoicePlan:
    """Chooses the prompts to compute, so that few prefills score all `sequences`.

    A sequence's last token is not computed, because only its log-probability is needed. If a
    sequence is the beginning of a longer one, both share one prefill.
    """

    def __init__(self, sequences: Sequence[list[int]], start: int) -> None:
        """Choose the prompts.

        Args:
            sequences: token ids of prompt and continuation together.
            start: the first position whose log-probability is wanted; all sequences have the same
                tokens before it.
        """
        self._sequences = sequences
        self._start = start
        # The first token of a sequence has no log-probability, because no token precedes it.
        self._first = max(start - 1, 0)
        self._runs: list[_Run] = []
        self._run_of: dict[tuple[int, ...], _Run] = {}
        head = list(sequences[0][:start]) if sequences else []
        contexts = {tuple(each[start:-1]) for each in sequences if self._needs_run(each)}
        # In reverse order, a context comes directly after a longer context that begins with it, if
        # there is one.
        longest: tuple[int, ...] | None = None
        for context in sorted(contexts, reverse=True):
            if longest is None or longest[: len(context)] != context:
                longest = context
                self._runs.append(_Run([*head, *context]))
            self._run_of[context] = self._runs[-1]
        for each in sequences:
            if self._needs_run(each):
                labels = self._run_of[tuple(each[start:-1])].labels
                labels.setdefault(each[-1], len(labels))

    def _needs_run(self, sequence: list[int]) -> bool:
        return len(sequence) > self._start and len(sequence) > 1

    def prompts(self) -> list[tuple[list[int], LogprobSpec]]:
        """Return each prompt's token ids, and the log-probabilities to request for it."""
        asked = []
        for run in self._runs:
            has_inputs = len(run.ids) > self._first + 1
            start_len = self._first if has_inputs else -1
            asked.append((run.ids, LogprobSpec(start_len, token_ids=list(run.labels))))
        return asked

    def read(self, found: Sequence[Prefill]) -> list[list[float | None]]:
        """Return the log-probability of each sequence's tokens from `start` on.

        Args:
            found: the results of `prompts()`, in the same order.

        Returns:
            A list for each sequence; `None` for a sequence's first token, which has no
            log-probability.
        """
        of_run = {id(run): each for run, each in zip(self._runs, found, strict=True)}
        values: list[list[float | None]] = []
        for sequence in self._sequences:
            if not self._needs_run(sequence):
                values.append([None] * (len(sequence) - self._start))
                continue
            run = self._run_of[tuple(sequence[self._start : -1])]
            prefill = of_run[id(run)]
            unknown: list[float | None] = [None] * (self._start == 0)
            last = len(sequence) - 1
            inside = prefill.inputs.chosen[: last - self._first - 1].tolist()
            at_last = (
                prefill.following.id_values(0)
                if last == len(run.ids)
                else prefill.inputs.id_values(last - self._first - 1)
            )
            values.append([*unknown, *inside, at_last[run.labels[sequence[-1]]]])
        return values


MAX_CHOICES = MAX_TOKEN_IDS
# The most prompt tokens of a request. Choices are usually a few words; more tokens would delay all
# other requests for a minute on a CPU.
MAX_CHOICE_TOKENS = 2**16


class SelectBody(msgspec.Struct, kw_only=True):
    """The body of `/v1/select`; unknown keys are ignored."""

    choices: Annotated[list[str | list[int]], at_most(MAX_CHOICES)]
    text: str | None = None
    input_ids: list[int] | None = None
    unconditional: bool = False
    rid: str | None = None


class Choice(TypedDict):
    """The scores of one choice.

    Each triple holds the log-probability, the id and the text of a token. The log-probability is
    `null` if no token precedes the token. `logprob` is the sum over the tokens. `prob` is the
    choice's probability among the given choices: the softmax of all their `logprob`.
    """

    token_logprobs: list[TripleBody]
    unconditional_token_logprobs: list[TripleBody] | None
    logprob: float
    prob: float


class SelectMeta(TypedDict):
    """Figures for all choices together.

    `cached_tokens` is the number of the prompt's tokens that were in the prefix cache when the
    request came. `computed_tokens` is the number of tokens computed for all choices.
    """

    id: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    weight_version: str
    e2e_latency: float


class Choices(TypedDict):
    """The answer of `/v1/select`: choices in the order of the request, and figures for all."""

    id: str
    choices: list[Choice]
    meta_info: SelectMeta


async def select(context: ServiceContext, body: SelectBody, body_size: int = 0) -> Choices:
    """Score every choice as a continuation of the request's prompt.

    The prompt may be empty. Prompt and choice are tokenized together, so a choice may change the
    prompt's last tokens: a blank at the end of the prompt may become part of a choice's first
    token. Scoring starts, for every choice, at the first position that any choice changes. The
    common prefix is computed once.

    Args:
        context: the server's context.
        body: the request.
        body_size: size of the body, bytes; a large body is processed outside the event loop.

    Raises:
        InvalidRequest: a value in `body` is wrong, or the model does not generate tokens.
        PrefillAborted: the request was aborted.
    """
    started_at = time.perf_counter()
    if context.model.gives != "tokens":
        raise InvalidRequest(
            "/v1/select needs a model that generates text; this server's "
            f"({context.model.architecture}) gives {context.model.gives}."
        )
    await work_out(body_size, _check, body, context.client.limits.vocab_size)
    prompt, encoded = await _encoded(context, body)
    num_tokens = len(prompt) * len(body.choices)
    num_tokens += sum(len(each) for each in body.choices if isinstance(each, list))
    if num_tokens > MAX_NUMBERS:
        raise InvalidRequest(
            f"The choices, each with the prompt, may have at most {MAX_NUMBERS} tokens together, "
            f"got {num_tokens}.",
            param="choices",
        )
    sequences, start = await work_out(num_tokens, _sequences, body, prompt, encoded)
    rid = new_id("select", body.rid)
    scored = await _score(context, rid, sequences, start)
    own = [each[start:] for each in sequences]
    alone = await _score(context, rid, own, 0) if body.unconditional else None
    first = scored.found[0] if scored.found else None
    return {
        "id": rid,
        "choices": _choices(context, own, scored, alone),
        "meta_info": {
            "id": rid,
            "prompt_tokens": len(prompt),
            "cached_tokens": 0 if first is None else first.cached_tokens,
            "computed_tokens": scored.num_computed + (0 if alone is None else alone.num_computed),
            "weight_version": context.weight_version if first is None else first.weight_version,
            "e2e_latency": time.perf_counter() - started_at,
        },
    }


@dataclass(frozen=True, slots=True)
class _Scored:
    logprobs: list[list[float | None]]
    found: list[Prefill]
    num_computed: int


async def _score(
    context: ServiceContext, rid: str, sequences: list[list[int]], start: int
) -> _Scored:
    plan = await work_out(sum(map(len, sequences)), ChoicePlan, sequences, start)
    prompts = plan.prompts()
    found = await prefill(context, rid, prompts, param="choices", most_tokens=MAX_CHOICE_TOKENS)
    num_computed = sum(len(ids) for ids, _ in prompts) - sum(each.cached_tokens for each in found)
    return _Scored(plan.read(found), found, num_computed)


def _check(body: SelectBody, vocab_size: int) -> None:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("Exactly one of text and input_ids must be given.", param="text")
    if not 1 <= len(body.choices) <= MAX_CHOICES:
        raise InvalidRequest(
            f"choices must have 1 to {MAX_CHOICES} entries, got {len(body.choices)}.",
            param="choices",
        )
    for name, ids in [
        ("input_ids", body.input_ids),
        *(("choices", each) for each in body.choices),
    ]:
        for token_id in ids if isinstance(ids, list) else ():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{name} must be in [0, {vocab_size}), got {token_id}.", param=name
                )


async def _encoded(context: ServiceContext, body: SelectBody) -> tuple[list[int], list[list[int]]]:
    """Encode the prompt, and each choice that is a text, together with a prompt that is a text."""
    texts = [each for each in body.choices if isinstance(each, str)]
    # The size is checked before the prompt is put in front of each choice, because the joined texts
    # could be a thousand times as long as the body.
    check_num_chars(len(body.text or "") * (1 + len(texts)) + sum(map(len, texts)))
    if body.text is None:
        encoded = await encode_texts(context.tokenizer, texts, add_special_tokens=False)
        return body.input_ids or [], encoded
    wanted: list[str | list[int]] = [body.text, *(body.text + each for each in texts)]
    prompt, *whole = await encode_prompts(context.tokenizer, wanted, context.client.limits)
    return prompt, whole


def _sequences(
    body: SelectBody, prompt: list[int], encoded: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Return prompt plus choice for each choice, and the first position to score."""
    of_texts = iter(encoded)
    sequences = []
    for each in body.choices:
        ids = next(of_texts) if isinstance(each, str) else each
        is_whole = isinstance(each, str) and body.text is not None
        sequences.append(ids if is_whole else [*prompt, *ids])
    start = len(prompt)
    for sequence in sequences:
        if sequence[:start] != prompt[:start]:
            pairs = zip(prompt[:start], sequence, strict=False)
            start = next((at for at, (a, b) in enumerate(pairs) if a != b), len(sequence))
    return sequences, start


def _choices(
    context: ServiceContext,
    own: list[list[int]],
    scored: _Scored,
    alone: _Scored | None,
) -> list[Choice]:
    sums = [sum(each for each in values if each is not None) for values in scored.logprobs]
    most = max(sums)
    parts = [math.exp(each - most) for each in sums]
    total = sum(parts)
    return [
        {
            "token_logprobs": _triples(context, ids, scored.logprobs[at]),
            "unconditional_token_logprobs": (
                None if alone is None else _triples(context, ids, alone.logprobs[at])
            ),
            "logprob": sums[at],
            "prob": parts[at] / total,
        }
        for at, ids in enumerate(own)
    ]


def _triples(
    context: ServiceContext, ids: list[int], values: list[float | None]
) -> list[TripleBody]:
    pieces = None if context.tokenizer.is_missing else context.token_pieces
    return [
        (value, token_id, None if pieces is None else pieces.text(token_id))
        for value, token_id in zip(values, ids, strict=True)
    ]
