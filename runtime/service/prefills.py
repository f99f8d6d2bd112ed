"""What a model makes of several prompts at once, without a token generated."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.client.generation_stream import GenerationChunk, GenerationInput
from runtime.errors import HeadraceError, InvalidRequest
from runtime.eventloop.json_body import work_out
from runtime.extras.logprobs.positions import (
    NAME,
    LogprobRows,
    LogprobSpec,
    outputs_of,
    read_blocks,
)
from runtime.requests.extra_spec import ExtraBlock
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.service.context import ServiceContext
from runtime.service.generation import generate, sample_rids

# Tokens that one request may have computed; a GPU takes ten seconds for the most.
MAX_TOKENS_TOGETHER = 2**20
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
    context: ServiceContext,
    rid: str,
    prompts: Sequence[tuple[list[int], LogprobSpec]],
    *,
    param: str,
    most_tokens: int = MAX_TOKENS_TOGETHER,
) -> list[Prefill]:
    """Compute every prompt, or none.

    The first one runs alone where all share a beginning: the others then find it in the prefix
    cache.

    Args:
        context: the server's.
        rid: the caller's name for all of them; aborting it aborts each.
        prompts: token ids, and what is asked about them.
        param: the field they came in.
        most_tokens: that may be computed; a context's worth always may.

    Raises:
        InvalidRequest: a prompt is wrong, or all together are too long.
        PrefillAborted: one was aborted.
    """
    all_ids = [ids for ids, _ in prompts]
    shares = _share_prefix(context, all_ids)
    # Of one prompt admission says whether it is too long.
    if len(prompts) > 1:
        num_tokens = await work_out(sum(map(len, all_ids)), _num_computed, all_ids, shares=shares)
        check_tokens_together(context, num_tokens, most_tokens, param)
    inputs = [
        GenerationInput(
            ids, RequestSpec(row=RowSpec(sampling=_NOTHING, extras=[wanted.extra()]), rid=each)
        )
        for each, (ids, wanted) in zip(sample_rids(rid, len(prompts)), prompts, strict=True)
    ]
    first = 1 if shares else 0
    return await _run(context, inputs[:first]) + await _run(context, inputs[first:])


def check_tokens_together(
    context: ServiceContext, num_tokens: int, most_tokens: int, param: str
) -> None:
    """Refuse a request that costs too much; see `docs/limits.md`.

    Raises:
        InvalidRequest: more than `most_tokens`, and more than a context holds.
    """
    most = max(most_tokens, context.client.limits.context_len)
    if num_tokens > most:
        raise InvalidRequest(
            f"A request may have at most {most} tokens computed for its {param}, and this one has "
            f"{num_tokens}: send several requests.",
            param=param,
        )


def _num_computed(prompts: Sequence[list[int]], *, shares: bool) -> int:
    """Tokens that are computed, those that all begin with once where that can be."""
    num_tokens = sum(map(len, prompts))
    if shares:
        # What the first and the last in order begin with, all others do.
        pairs = zip(min(prompts), max(prompts), strict=False)
        shortest = min(map(len, prompts))
        common = next((at for at, (a, b) in enumerate(pairs) if a != b), shortest)
        num_tokens -= common * (len(prompts) - 1)
    return num_tokens


async def _run(context: ServiceContext, inputs: list[GenerationInput]) -> list[Prefill]:
    if not inputs:
        return []
    blocks: list[list[ExtraBlock]] = [[] for _ in inputs]
    found: dict[int, Prefill] = {}
    generation = await generate(context, inputs)
    async with contextlib.aclosing(generation.chunks()) as chunks:
        async for index, chunk in chunks:
            blocks[index] += chunk.blocks(NAME, is_input=True)
            # Read as it comes, in the turns of its chunks: all at once would hold the loop.
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
