"""Runs requests of `Engine.generate` on the engine's loop; returns whole answers or chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from headrace.engine.core import EngineCore
from headrace.engine.engine_errors import translated
from headrace.engine.progress_bar import Progress
from headrace.engine.workers import run_workers
from runtime.client.answer_size import check_answer_size
from runtime.client.front_extras import check_extras
from runtime.client.generation_stream import GenerationInput
from runtime.service.adapter_names import with_adapters
from runtime.service.context import ServiceContext
from runtime.service.generate_request import (
    GenerateBody,
    GeneratePlan,
    Prompts,
    Sample,
    plan_generate,
)
from runtime.service.generation import NativeGeneration, admit_plan, open_output
from runtime.service.image_prompts import encode_with_images
from runtime.text.encoding import check_text_size, encode_texts

Answer = dict[str, Any]

# Fewer prompts than this are tokenized on the event loop instead of on a thread.
_FEW_PROMPTS = 64
# How many requests are in flight for each place in the running batch. The number is so large that a
# free place never waits for the next request.
_IN_FLIGHT_PER_ROW = 4


async def generate_all(
    core: EngineCore, body: GenerateBody, show_progress: bool | None
) -> list[Answer] | Answer:
    """Return every answer of a call, in order; cancelling aborts the running requests.

    Only some requests of a large batch are in flight at a time, so a batch may have any size.
    """
    with translated():
        core.check_alive()
        context = core.context
        plan = _plan(context, body)
        prompt_ids, plan = await _encode(context, plan)
        # Requests of a session are not checked here: their prompt is known only when they join it.
        for sample in plan.samples if plan.session is None else ():
            # All prompts are checked before the first one runs, so that one wrong prompt refuses
            # the whole call.
            input_ids = context.client.admit(prompt_ids[sample.prompt_index], sample.spec).input_ids
            check_extras(sample.spec.extras, len(input_ids))
            check_answer_size([GenerationInput(input_ids, sample.spec)], context.client.limits)
        with Progress(len(plan.samples), show_progress) as progress:
            answers = await _run_all(context, plan, prompt_ids, progress)
    return answers[0] if plan.is_single else answers


async def _run_all(
    context: ServiceContext, plan: GeneratePlan, prompt_ids: list[list[int]], progress: Progress
) -> list[Answer]:
    answers: list[Answer] = [{}] * len(plan.samples)
    remaining = iter(enumerate(plan.samples))

    async def work() -> None:
        for index, sample in remaining:
            answers[index] = await _run(context, plan, sample, prompt_ids[sample.prompt_index])
            progress.advance(answers[index]["meta_info"]["completion_tokens"])

    await run_workers(work, min(_most_in_flight(context), len(plan.samples)))
    return answers


async def _run(
    context: ServiceContext, plan: GeneratePlan, sample: Sample, input_ids: list[int]
) -> Answer:
    output = open_output(context, plan, GenerationInput(input_ids, sample.spec))
    answer: Answer = {}
    try:
        async for chunk in output.stream:
            answer = output.answer(chunk)
    finally:
        output.stream.close()
    return answer


def _most_in_flight(context: ServiceContext) -> int:
    worker = context.status.worker
    rows = worker.max_running_requests if worker is not None else 1
    most = _IN_FLIGHT_PER_ROW * rows * len(context.status.replicas)
    queued = context.max_queued_requests
    return most if queued is None else max(1, min(most, queued))


def _plan(context: ServiceContext, body: GenerateBody) -> GeneratePlan:
    vocab_size = context.client.limits.vocab_size
    return plan_generate(
        body,
        context.sampling_defaults,
        vocab_size,
        max_batch=None,
        features=context.features,
    )


async def _encode(
    context: ServiceContext, plan: GeneratePlan
) -> tuple[list[list[int]], GeneratePlan]:
    """Return the token ids of the prompts, and `plan` with its images and adapters loaded."""
    plan = await with_adapters(context, plan)
    encode = partial(_encode_prompts, context)
    if plan.images:
        return await encode_with_images(context, plan, encode)
    return await encode(plan.prompts), plan


async def _encode_prompts(context: ServiceContext, prompts: Prompts) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    for text in texts:
        check_text_size(text, context.client.limits)
    if len(texts) < _FEW_PROMPTS:
        return await encode_texts(context.tokenizer, texts)
    # All prompts are tokenized in one call, because the tokenizer library then uses every core, and
    # releases the GIL.
    return await asyncio.to_thread(context.tokenizer.encode_batch, texts)


class StreamedRequest:
    """A streaming call whose chunks are read one by one; all methods run on the engine's loop."""

    def __init__(self, generation: NativeGeneration, incremental: bool) -> None:
        """Wrap the generation of an admitted request; only `open_request` calls this."""
        self._generation = generation
        self._answers = self._read(incremental)

    async def _read(self, incremental: bool) -> AsyncGenerator[Answer, None]:
        async for chunk, answer in self._generation.answers(incremental=incremental):
            if "text" in answer:
                answer["text_delta"] = chunk.text
            yield answer

    async def read(self) -> Answer | None:
        """Return the next chunk, or `None` after the last one."""
        with translated():
            return await anext(self._answers, None)

    async def abandon(self) -> None:
        """Abort all requests of this call that still run."""
        # The streams are closed first, because a generator that never started runs no cleanup code.
        self._generation.close()
        try:
            await self._answers.aclose()
        except RuntimeError:
            # A cancelled `read` is still inside the generator, whose cleanup then ends the request.
            return


async def open_request(core: EngineCore, body: GenerateBody, incremental: bool) -> StreamedRequest:
    """Start a streaming call; either all of its samples are admitted or none is."""
    with translated():
        core.check_alive()
        plan = _plan(core.context, body)
        prompt_ids, plan = await _encode(core.context, plan)
        generation = await admit_plan(core.context, plan, prompt_ids)
        return StreamedRequest(generation, incremental)
