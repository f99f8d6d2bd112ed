"""What a model makes of several prompts at once, without a token generated."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.client.generation_stream import GenerationChunk, GenerationInput
from runtime.errors import HeadraceError
from runtime.extras.logprobs.positions import (
    NAME,
    LogprobRows,
    LogprobSpec,
    outputs_of,
    read_blocks,
)
from runtime.requests.extra_spec import ExtraBlock
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.service.context import ServiceContext
from runtime.service.streams import merge, open_streams, sample_rids

# What would come next is told even where nothing is generated.
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)


class PrefillAborted(HeadraceError):
    """Somebody aborted the request before every prompt was computed."""

    status_code = 400


@dataclass(slots=True)
class Prefill:
    """What was asked about one prompt.

    Attributes:
        inputs: one for each of the prompt's tokens after the first that is reported.
        following: one, about the token that would come next.
        cached_tokens: of the prompt, found in the prefix cache.
        weight_version: label of the weights that computed it.
    """

    inputs: LogprobRows
    following: LogprobRows
    cached_tokens: int
    weight_version: str


async def prefill(
    context: ServiceContext, rid: str, prompts: Sequence[tuple[list[int], LogprobSpec]]
) -> list[Prefill]:
    """Compute every prompt, or none.

    The first one runs alone where all share a beginning: the others then find it in the prefix
    cache.

    Args:
        context: the server's.
        rid: the caller's name for all of them; aborting it aborts each.
        prompts: token ids, and what is asked about them.

    Raises:
        InvalidRequest: a prompt is wrong.
        PrefillAborted: one was aborted.
    """
    inputs = [
        GenerationInput(ids, RequestSpec(sampling=_NOTHING, rid=each, extras=[wanted.extra()]))
        for each, (ids, wanted) in zip(sample_rids(rid, len(prompts)), prompts, strict=True)
    ]
    first = 1 if _share_prefix(context, [ids for ids, _ in prompts]) else 0
    return await _run(context, inputs[:first]) + await _run(context, inputs[first:])


async def _run(context: ServiceContext, inputs: list[GenerationInput]) -> list[Prefill]:
    if not inputs:
        return []
    blocks: list[list[ExtraBlock]] = [[] for _ in inputs]
    found: dict[int, Prefill] = {}
    streams = await open_streams(context.client.generate, inputs, context.client.limits)
    async with contextlib.aclosing(merge(streams)) as chunks:
        async for index, chunk in chunks:
            blocks[index] += chunk.blocks(NAME, is_input=True)
            # Read as it comes, in the turns of `merge`: all at once would hold the loop.
            if chunk.finish_reason is not None:
                found[index] = _read(blocks[index], chunk)
    return [found[index] for index in range(len(inputs))]


def _read(blocks: list[ExtraBlock], end: GenerationChunk) -> Prefill:
    following = outputs_of(end)
    if not following:
        raise PrefillAborted("The request was aborted.")
    return Prefill(read_blocks(blocks), following, end.cached_tokens, end.weight_version)


def _share_prefix(context: ServiceContext, prompts: Sequence[list[int]]) -> bool:
    worker = context.status.worker
    if len(prompts) < 2 or worker is None or context.config.scheduling.disable_radix_cache:
        return False
    size = worker.page_size
    return all(len(each) > size and each[:size] == prompts[0][:size] for each in prompts)
