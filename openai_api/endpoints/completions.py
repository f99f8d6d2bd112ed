"""`/v1/completions`: continues texts or token ids, without a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from openai_api.aborted import ended
from openai_api.best_of import SampleScores
from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.infill import required_infill
from openai_api.logprobs import CompletionLogprobs, completion_spec
from openai_api.obfuscation import obfuscation_of
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.sampling import WireNames, sampling_of
from openai_api.schemas.common import (
    StreamOptions,
    cache_namespace,
    check_rid,
    hidden_extras,
    session_of,
)
from openai_api.schemas.completions import (
    DECODER,
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    check_completion_request,
    num_samples,
    prompts_of,
)
from openai_api.usage import TokenCount, usage_of
from runtime.client.generation_stream import GenerationInput
from runtime.client.replica_router import wanted_rank
from runtime.errors import InvalidRequest
from runtime.eventloop.json_body import let_go
from runtime.eventloop.json_pieces import list_of
from runtime.extras.hidden_states.answer import HiddenAnswer
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.messages import FinishReason
from runtime.requests.identity import created_now
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import check_priority, nth_sample
from runtime.service.adapter_names import named_adapter
from runtime.service.generation import (
    Chunk,
    Generation,
    Indexed,
    event,
    generate,
    new_id,
    sample_rids,
)
from runtime.text.encoding import encode_prompts
from runtime.text.tokenizer import decode_texts

# Encoding this many characters of text as JSON takes as long as encoding one number.
_CHARS_PER_COST = 64


async def create_completion(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/completions`, at once or as a stream."""
    body = await read_body(call, DECODER)
    try:
        return await _answer(body, context)
    finally:
        let_go(body.prompt)


async def _answer(body: CompletionRequest, context: OpenAIContext) -> Reply:
    with WireNames("max_tokens", "logprobs"):
        plan = await _plan(body, context)
        generation = await generate(context.service, plan.inputs, session=session_of(body))
    if body.stream:
        return Streamed(_events(plan, await generation.begun()), generation.close)
    return await _whole(plan, generation)


@dataclass(frozen=True)
class _Plan:
    """A checked request, ready for the engine.

    Attributes:
        inputs: the engine's inputs in the order of prompts, `num_samples` for each prompt.
        wanted_logprobs: the requested log-probabilities, the same for every choice.
        hidden: whether hidden states are requested.
        echoes: for each input, the text to put before its output.
        num_samples: number of samples that are generated for each prompt.
        n: number of samples that are returned for each prompt: the best ones.
    """

    id: str
    created: int
    model: str
    inputs: list[GenerationInput]
    wanted_logprobs: LogprobSpec | None
    hidden: bool
    echoes: list[str]
    num_samples: int
    n: int
    options: StreamOptions
    context: OpenAIContext

    def logprobs(self) -> list[CompletionLogprobs | None]:
        """Return a new collector of log-probabilities for each input; `None` if not requested."""
        pieces, spec = self.context.service.token_pieces, self.wanted_logprobs
        return [
            None if spec is None else CompletionLogprobs(pieces, spec, item.input_ids)
            for item in self.inputs
        ]

    def hidden_states(self) -> list[HiddenAnswer]:
        """Return a new collector of hidden states for each input; an empty list if not wanted."""
        if not self.hidden:
            return []
        size = self.context.service.model.hidden_size
        return [HiddenAnswer(size, only_last=True) for _ in self.inputs]

    def answered(self, scores: SampleScores | None) -> Iterable[int]:
        """Return the indices of the samples to return; with `scores`, the best `n` per prompt."""
        if scores is None:
            return range(len(self.inputs))
        firsts = range(0, len(self.inputs), self.num_samples)
        groups = (range(first, first + self.num_samples) for first in firsts)
        return [index for group in groups for index in scores.best(group, self.n)]

    def usage(self, counts: Sequence[TokenCount]) -> dict[str, Any]:
        report_cache = self.context.service.config.http.enable_cache_report
        return usage_of(counts, report_cache=report_cache, samples_per_prompt=self.num_samples)


async def _plan(body: CompletionRequest, context: OpenAIContext) -> _Plan:
    check_completion_request(body)
    adapter_id = await named_adapter(context.service, body.model, body.lora_path)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # With `echo`, zero tokens are allowed: a prompt may be scored without generating.
    least = 0 if body.echo else 1
    if max_tokens < least:
        raise InvalidRequest(
            f"max_tokens must be at least {least}, got {max_tokens}.", param="max_tokens"
        )
    service = context.service
    vocab_size = service.client.limits.vocab_size
    sampling = sampling_of(body, max_tokens, service.sampling_defaults, vocab_size)
    n, samples = sampling.n, num_samples(body)
    sampling = msgspec.structs.replace(sampling, n=samples)
    logprobs = completion_spec(body.logprobs, bool(body.echo))
    if body.echo and session_of(body) is not None:
        raise InvalidRequest("echo cannot be combined with session_params.", param="echo")
    prompts = prompts_of(body)
    answer_id, rids = _rids(body, len(prompts), samples)
    if body.suffix:
        infill = required_infill(context.infill)
        ids = await infill.encode(prompts, body.suffix, service.client.limits)
        sampling = infill.ending(sampling)
    else:
        ids = await _encode(prompts, context)
    namespace, priority = cache_namespace(body), check_priority(body.priority)
    hidden = hidden_extras(body, context.service.features.offered)
    # `best_of` ranks samples by their log-probabilities, so it needs them too.
    reported = logprobs or (LogprobSpec() if samples > n else None)
    extras = [*([] if reported is None else [reported.extra()]), *hidden]
    inputs = [
        GenerationInput(
            ids[at],
            RequestSpec(
                row=RowSpec(
                    sampling=nth_sample(sampling, sample), extras=extras, adapter_id=adapter_id
                ),
                rid=rids[at * samples + sample],
                stream=bool(body.stream),
                # If the client did not set `max_tokens`, a prompt that leaves less room than the
                # default is served all the same.
                explicit_max_new_tokens=body.max_tokens is not None,
                cache_namespace=namespace,
                priority=priority,
                dp_rank=wanted_rank(body.routed_dp_rank, body.data_parallel_rank),
            ),
        )
        for at in range(len(prompts))
        for sample in range(samples)
    ]
    return _Plan(
        id=answer_id,
        created=created_now(),
        model=body.model or "default",
        inputs=inputs,
        wanted_logprobs=logprobs,
        hidden=bool(hidden),
        echoes=await _echoes(body, prompts, context, samples),
        num_samples=samples,
        n=n,
        options=body.stream_options or StreamOptions(),
        context=context,
    )


def _rids(body: CompletionRequest, num_prompts: int, n: int) -> tuple[str, list[str]]:
    """Return the answer's id, and the `rid` of each input."""
    rid = body.rid
    if not isinstance(rid, list):
        check_rid(rid)
        answer_id = new_id("cmpl", rid)
        return answer_id, sample_rids(answer_id, num_prompts * n)
    if len(rid) != num_prompts:
        raise InvalidRequest(
            f"rid must have one entry for each of the {num_prompts} prompts, got {len(rid)}.",
            param="rid",
        )
    for each in rid:
        check_rid(each)
    return rid[0], [name for each in rid for name in sample_rids(each, n)]


async def _encode(prompts: list[str | list[int]], context: OpenAIContext) -> list[list[int]]:
    service = context.service
    ids = await encode_prompts(service.tokenizer, prompts, service.client.limits)
    if not all(isinstance(prompt, str) for prompt in prompts):
        # The answer is text, so a tokenizer is needed even if the prompts are token ids.
        service.tokenizer.check_present()
    return ids


async def _echoes(
    body: CompletionRequest, prompts: list[str | list[int]], context: OpenAIContext, n: int
) -> list[str]:
    if not body.echo:
        return [""] * (len(prompts) * n)
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    skips = body.skip_special_tokens is not False
    decoded = iter(await decode_texts(context.service.tokenizer, ids, skip_special_tokens=skips))
    texts = [prompt if isinstance(prompt, str) else next(decoded) for prompt in prompts]
    return [text for text in texts for _ in range(n)]


def _choice(
    index: int, text: str, reason: FinishReason | None, logprobs: CompletionLogprobs | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs.take() if logprobs is not None else None,
        "finish_reason": reason.type if reason else None,
        "matched_stop": reason.matched if reason else None,
    }


def _head(plan: _Plan) -> dict[str, Any]:
    return {
        "id": plan.id,
        "object": "text_completion",
        "created": plan.created,
        "model": plan.model,
    }


async def _whole(plan: _Plan, generation: Generation) -> Whole:
    counts = [TokenCount() for _ in plan.inputs]
    logprobs, hidden = plan.logprobs(), plan.hidden_states()
    texts = [[echo] for echo in plan.echoes]
    reasons: list[FinishReason | None] = [None] * len(plan.inputs)
    scores = SampleScores(len(plan.inputs)) if plan.n < plan.num_samples else None
    async with contextlib.aclosing(generation.chunks()) as chunks:
        async for index, chunk in chunks:
            counts[index].add(chunk)
            texts[index].append(chunk.text)
            reasons[index] = chunk.finish_reason
            if hidden:
                hidden[index].add(chunk)
            if (lists := logprobs[index]) is not None:
                lists.add(chunk)
            if scores is not None:
                scores.add(index, chunk)
    for reason in reasons:
        ended(reason)
    choices = (
        {
            **_choice(number, "".join(texts[index]), reasons[index], logprobs[index]),
            **({"hidden_states": hidden[index]} if hidden else {}),
        }
        for number, index in enumerate(plan.answered(scores))
    )
    body = {
        **_head(plan),
        "choices": list_of(choices, _cost(texts, logprobs)),
        "usage": plan.usage(counts),
        "metadata": {"weight_version": plan.context.service.weight_version},
    }
    return Whole(body)


def _cost(texts: list[list[str]], logprobs: list[CompletionLogprobs | None]) -> int:
    num_chars = sum(len(part) for text in texts for part in text)
    values = sum(lists.num_values for lists in logprobs if lists is not None)
    return 8 * len(texts) + num_chars // _CHARS_PER_COST + values


async def _events(
    plan: _Plan, chunks: AsyncGenerator[Indexed, None]
) -> AsyncGenerator[Chunk, None]:
    head = _head(plan)
    counts = [TokenCount() for _ in plan.inputs]
    logprobs, hidden = plan.logprobs(), plan.hidden_states()
    echoes = list(plan.echoes)
    async with contextlib.aclosing(chunks):
        async for index, chunk in chunks:
            counts[index].add(chunk)
            if hidden:
                hidden[index].add(chunk)
            if (lists := logprobs[index]) is not None:
                lists.add(chunk)
            text = echoes[index] + chunk.text
            echoes[index] = ""
            if not text and chunk.finish_reason is None:
                continue
            if chunk.finish_reason is not None:
                ended(chunk.finish_reason)
            choice = _choice(index, text, chunk.finish_reason, lists)
            content = {**head, "choices": [choice]}
            if plan.options.continuous_usage_stats:
                content["usage"] = plan.usage(counts)
            elif plan.options.include_usage:
                content["usage"] = None
            if plan.options.include_obfuscation:
                content["obfuscation"] = obfuscation_of(text)
            yield event(content)
    for index, states in enumerate(hidden):
        choice = {**_choice(index, "", None, None), "hidden_states": states}
        yield event({**head, "choices": [choice]})
    if plan.options.include_usage:
        yield event({**head, "choices": [], "usage": plan.usage(counts)})
