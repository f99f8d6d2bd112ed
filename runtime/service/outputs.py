"""A native request in the engine's hands: samples admitted, chunks turned into answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from runtime.client.admission import check_text_size
from runtime.client.front_extras import AnsweredSample, ExtraAnswer, answers_of
from runtime.client.generation_stream import GenerationChunk, GenerationInput, GenerationStream
from runtime.errors import InvalidRequest
from runtime.ipc.messages import FinishReason
from runtime.requests.sampling_params import SamplingParams
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GeneratePlan, Sample
from runtime.service.streams import merge


class Output:
    """One sample's answer so far, in the words of the native API."""

    def __init__(
        self,
        stream: GenerationStream,
        rid: str,
        prompt_token_ids: list[int] | None,
        extras: Sequence[ExtraAnswer] = (),
        *,
        tells_rank: bool = False,
        has_text: bool = True,
    ) -> None:
        """Start empty.

        Args:
            stream: where its chunks come from.
            rid: the request's name.
            prompt_token_ids: echoed when given.
            extras: collect what is asked for beside tokens.
            tells_rank: whether the replica matters.
            has_text: whether the server has a tokenizer.
        """
        self._has_text = has_text
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
        if self._tells_rank:
            meta["dp_rank"] = self.stream.dp_rank
        for extra in self._extras:
            meta.update(extra.meta_info())
        if chunk.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started_at
            meta["response_sent_to_client_ts"] = time.time()
        return meta

    def end(self, answer: dict[str, Any]) -> None:
        """Put into the last answer what extras tell there only."""
        if answer["meta_info"]["finish_reason"] is not None:
            for extra in self._extras:
                answer["meta_info"].update(extra.at_end())

    async def end_json(self, answer: dict[str, Any]) -> None:
        """The same, where the answer becomes JSON."""
        if answer["meta_info"]["finish_reason"] is not None:
            for extra in self._extras:
                answer["meta_info"].update(await extra.at_end_json())


def describe_finish(reason: FinishReason | None) -> dict[str, Any] | None:
    """The wire's `finish_reason`: `null` while the request runs."""
    if reason is None:
        return None
    described: dict[str, Any] = msgspec.to_builtins(reason)
    return described


async def tokenize_prompts(context: ServiceContext, plan: GeneratePlan) -> list[list[int]]:
    """Token ids of each prompt of `plan`.

    Raises:
        InvalidRequest: a text that is far too long, or half a surrogate pair.
    """
    prompt_ids = []
    for prompt in plan.prompts:
        if isinstance(prompt, str):
            check_text_size(prompt, context.client.limits)
            prompt_ids.append(await context.tokenizer.encode_async(prompt))
        else:
            prompt_ids.append(prompt)
    return prompt_ids


def _refuse_text_rules(sampling: SamplingParams) -> None:
    for name in ("stop", "stop_regex", "min_new_tokens"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{name} needs a tokenizer, and this server was started with "
                "--skip-tokenizer-init; stop_token_ids works.",
                param=name,
            )


def open_output(
    context: ServiceContext, plan: GeneratePlan, sample: Sample, input_ids: list[int]
) -> Output:
    """Admit one sample of `plan`.

    Raises:
        InvalidRequest: it can never fit, or its `rid` is in flight.
        EngineNotReady, Overloaded: it cannot be taken now.
    """
    if context.tokenizer.is_missing:
        _refuse_text_rules(sample.spec.sampling)
    client = context.client
    generate = client.generate if plan.is_recorded else client.generate_unrecorded
    item = GenerationInput(input_ids, sample.spec)
    if plan.session is None:
        stream = generate(item)
    else:
        stream = context.sessions.generate(plan.session, item, generate)
        assert stream.turn is not None
        input_ids = stream.turn.prompt().tolist()
    echoed = input_ids if plan.return_prompt_token_ids else None
    extras: list[ExtraAnswer] = []
    if sample.spec.extras:
        prompt_ids, hidden_size = input_ids[: stream.prompt_tokens], context.model.hidden_size
        answered = AnsweredSample(
            prompt_ids, hidden_size, lambda token_id: context.token_pieces.text(token_id)
        )
        extras = answers_of(sample.spec.extras, answered)
    return Output(
        stream,
        sample.spec.rid,
        echoed,
        extras,
        tells_rank=len(client.links) > 1,
        has_text=not context.tokenizer.is_missing,
    )


def open_outputs(
    context: ServiceContext, plan: GeneratePlan, prompt_ids: list[list[int]]
) -> list[Output]:
    """Admit every sample of `plan`, or none: one bad prompt takes the others back."""
    outputs: list[Output] = []
    try:
        for sample in plan.samples:
            input_ids = prompt_ids[sample.prompt_index]
            outputs.append(open_output(context, plan, sample, input_ids))
    except Exception:
        for output in outputs:
            output.stream.take_back()
        raise
    return outputs


async def read_all(outputs: list[Output]) -> list[dict[str, Any]]:
    """Every output's answer, once all have ended."""
    answers: list[dict[str, Any]] = [{}] * len(outputs)
    async for index, chunk in merge([output.stream for output in outputs]):
        answers[index] = outputs[index].answer(chunk)
    for output, answer in zip(outputs, answers, strict=True):
        await output.end_json(answer)
    return answers
