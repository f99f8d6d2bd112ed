"""Computes the log-probabilities of several prompts without generating a token."""

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

# The most tokens that are computed for one request; a GPU takes about ten seconds for them.
MAX_TOKENS_TOGETHER = 2**20
# Sampling parameters of a request that only computes its prompt. The log-probabilities of the next
# token are reported although no token is generated.
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)


class PrefillAborted(HeadraceError):
    """The request was aborted before every prompt was computed."""

    status_code = 400


@dataclass(slots=True)
class Prefill:
    """Log-probabilities of one prompt.

    Attributes:
        inputs: log-probabilities of the prompt's own tokens. Entry 0 belongs to the token after the
            first reported position.
        following: one entry: log-probabilities of the token after the prompt.
        cached_tokens: number of the prompt's tokens that were in the prefix cache.
        weight_version: label of the weights that computed the prompt.
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
    """Compute every prompt, or none if one is refused.

    If all prompts share a prefix of at least a page, the first one runs alone, so that the others
    find the prefix in the cache.

    Args:
        context: the server's context.
        rid: the caller's name for all prompts; aborting it aborts every prompt.
        prompts: token ids and requested log-probabilities of each prompt.
        param: the request field that has the prompts, for error messages.
        most_tokens: the most tokens that may be computed for all prompts together. If the context
            is longer, its length is the limit.

    Raises:
        InvalidRequest: a prompt is invalid, or the prompts are too long together.
        PrefillAborted: a prompt was aborted.
    """
    all_ids = [ids for ids, _ in prompts]
    shares = _share_prefix(context, all_ids)
    # The length of a single prompt is checked by admission.
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
    """Refuse a request for which more tokens must be computed than allowed (`docs/limits.md`).

    Args:
        context: the server's context.
        num_tokens: number of tokens that the request needs computed.
        most_tokens: the bound. A greater context length takes its place.
        param: the request field that has the prompts, for the message.

    Raises:
        InvalidRequest: `num_tokens` is above the bound.
    """
    most = max(most_tokens, context.client.limits.context_len)
    if num_tokens > most:
        raise InvalidRequest(
            f"A request may have at most {most} tokens computed for its {param}, and this one has "
            f"{num_tokens}: send several requests.",
            param=param,
        )


def _num_computed(prompts: Sequence[list[int]], *, shares: bool) -> int:
    """Return the number of tokens to compute; with `shares`, a common prefix counts once."""
    num_tokens = sum(map(len, prompts))
    if shares:
        # In sorted order, all prompts share exactly what the first and the last one share.
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
            # Each result is read when its last chunk arrives: reading all results at the end would
            # block the event loop.
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
