"""A native request in the engine's hands: samples admitted, chunks turned into answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from runtime.client.answer_size import check_answer_size
from runtime.client.front_extras import AnsweredSample, ExtraAnswer, answers_of
from runtime.client.generation_stream import GenerationChunk, GenerationInput, GenerationStream
from runtime.client.json_body import work_out
from runtime.client.json_pieces import INLINE_COST, JsonItems, Pieces
from runtime.errors import InvalidRequest
from runtime.ipc.messages import FinishReason
from runtime.requests.sampling_params import SamplingParams
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GenerateBody, GeneratePlan, plan_generate
from runtime.service.streams import merge, open_each


class Output:
    """One sample's answer so far, in the words of the native API."""

    def __init__(
        self,
        stream: GenerationStream,
        rid: str,
        prompt_token_ids: list[int] | None,
        extras: Sequence[ExtraAnswer] = (),
        *,
        num_image_tokens: int = 0,
        tells_rank: bool = False,
        has_text: bool = True,
    ) -> None:
        """Start empty.

        Args:
            stream: where its chunks come from.
            rid: the request's name.
            prompt_token_ids: echoed when given.
            extras: collect what is asked for beside tokens.
            num_image_tokens: of the prompt.
            tells_rank: whether the replica matters.
            has_text: whether the server has a tokenizer.
        """
        self._has_text = has_text
        self._num_image_tokens = num_image_tokens
        self._tells_rank = tells_rank
        self._extras = extras
        self.stream = stream
        self.rid = rid
        self._prompt_token_ids = prompt_token_ids
        self._started_at = time.perf_counter()
        self._text = ""
        self._output_ids: list[int] = []
        self._completion_tokens = 0

    def answer(self, chunk: GenerationChunk, *, incremental: bool = False) -> dict[str, Any]:
        """Take in `chunk` and give the answer up to it, or only what is new."""
        self._completion_tokens += len(chunk.token_ids)
        for extra in self._extras:
            extra.add(chunk, incremental=incremental)
        if incremental:
            self._text, self._output_ids = chunk.text, chunk.token_ids
        else:
            self._text += chunk.text
            # A new list: a caller in this process may keep the answer given before.
            self._output_ids = [*self._output_ids, *chunk.token_ids]
        answer: dict[str, Any] = {
            **({"text": self._text} if self._has_text else {}),
            "output_ids": self._output_ids,
            "meta_info": self._meta_info(chunk),
        }
        if self._prompt_token_ids is not None:
            answer["prompt_token_ids"] = self._prompt_token_ids
        return answer

    def take_back(self) -> None:
        """Undo the admission: nothing was read yet."""
        self.stream.take_back()

    def _meta_info(self, chunk: GenerationChunk) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": describe_finish(chunk.finish_reason),
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "cached_tokens": chunk.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": chunk.weight_version,
            # The engine counts retractions for the server as a whole, not for each request.
            "total_retractions": chunk.num_retractions,
        }
        if self._num_image_tokens:
            meta["image_tokens"] = self._num_image_tokens
        if self._tells_rank:
            meta["dp_rank"] = self.stream.dp_rank
        for extra in self._extras:
            meta.update(extra.meta_info())
        if chunk.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started_at
            meta["response_sent_to_client_ts"] = time.time()
            for extra in self._extras:
                meta.update(extra.at_end())
        return meta


def describe_finish(reason: FinishReason | None) -> dict[str, Any] | None:
    """The wire's `finish_reason`: `null` while the request runs."""
    if reason is None:
        return None
    described: dict[str, Any] = msgspec.to_builtins(reason)
    return described


async def plan_body(context: ServiceContext, body: GenerateBody, body_size: int) -> GeneratePlan:
    """The request that a body of `body_size` bytes asks for; see `plan_generate`."""
    num_prompts = 1
    for each in (body.text, body.input_ids, body.sampling_params):
        if isinstance(each, list) and each and not isinstance(each[0], int):
            num_prompts = max(num_prompts, len(each))
    return await work_out(
        # Each prompt has parameters that are checked: that takes the time of a kilobyte.
        max(body_size, num_prompts * 1024),
        plan_generate,
        body,
        context.sampling_defaults,
        context.client.limits.vocab_size,
        features=context.features,
    )


def _refuse_text_rules(sampling: SamplingParams) -> None:
    for name in ("stop", "stop_regex", "min_new_tokens"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{name} needs a tokenizer, and this server was started with "
                "--skip-tokenizer-init; stop_token_ids works.",
                param=name,
            )


def open_output(
    context: ServiceContext, plan: GeneratePlan, item: GenerationInput, *, as_json: bool = False
) -> Output:
    """Admit one sample of `plan`.

    Args:
        context: the server's.
        plan: the request.
        item: the sample.
        as_json: whether its answers will be encoded; else they are Python's own lists.

    Raises:
        InvalidRequest: it can never fit, or its `rid` is in flight.
        EngineNotReady, Overloaded: it cannot be taken now.
    """
    if context.tokenizer.is_missing:
        _refuse_text_rules(item.spec.sampling)
    stream = context.generator(plan.session, is_recorded=plan.is_recorded)(item)
    # What a session adds is part of the prompt.
    input_ids = item.input_ids if stream.turn is None else stream.turn.prompt().tolist()
    extras: list[ExtraAnswer] = []
    if item.spec.extras:
        answered = AnsweredSample(
            input_ids[: stream.prompt_tokens],
            context.model.hidden_size,
            lambda token_id: context.token_pieces.text(token_id),
            as_json=as_json,
            is_shown_again=plan.stream,
        )
        extras = answers_of(item.spec.extras, answered)
    return Output(
        stream,
        item.spec.rid,
        input_ids if plan.return_prompt_token_ids else None,
        extras,
        num_image_tokens=sum(each.image.num_tokens for each in item.spec.images),
        tells_rank=len(context.client.links) > 1,
        has_text=not context.tokenizer.is_missing,
    )


async def open_outputs(
    context: ServiceContext,
    plan: GeneratePlan,
    prompt_ids: list[list[int]],
    *,
    as_json: bool = False,
) -> list[Output]:
    """Admit every sample of `plan`, or none: one bad prompt takes the others back.

    Args:
        context: the server's.
        plan: the request.
        prompt_ids: of each of its prompts.
        as_json: as of `open_output`; then what all its answers might weigh is checked, too.
    """
    inputs = [GenerationInput(prompt_ids[each.prompt_index], each.spec) for each in plan.samples]
    if as_json:
        check_answer_size(inputs, context.client.limits)
    open_one = partial(open_output, context, plan, as_json=as_json)
    # One is all of them.
    return [open_one(inputs[0])] if len(inputs) == 1 else await open_each(inputs, open_one)


def as_pieces(answers: list[dict[str, Any]]) -> JsonItems:
    """A list of whole answers, encoded one after the other."""
    cost = 0
    for answer in answers:
        cost += 1 + len(answer["output_ids"]) + len(answer.get("prompt_token_ids", ()))
        numbers = answer["meta_info"].values()
        cost += sum(each.cost for each in numbers if isinstance(each, Pieces))
        # Whatever comes behind, it is large: to look at thousands would take long.
        if cost > INLINE_COST:
            break
    return JsonItems(answers, cost)


async def read_all(outputs: list[Output]) -> list[dict[str, Any]]:
    """Every output's answer, once all have ended."""
    answers: list[dict[str, Any]] = [{}] * len(outputs)
    async for index, chunk in merge([output.stream for output in outputs]):
        answers[index] = outputs[index].answer(chunk)
    return answers
