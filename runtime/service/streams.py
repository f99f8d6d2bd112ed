"""Several samples of one request, read as one: opened together, merged, closed together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from runtime.client.admission import EngineLimits
from runtime.client.answer_size import check_answer_size
from runtime.client.generation_stream import GenerationChunk, GenerationInput, GenerationStream
from runtime.client.turns import SLICE_S, Slices
from runtime.requests.random_hex import random_hex

T = TypeVar("T")


class Opened(Protocol):
    """What stands for an admitted sample."""

    def take_back(self) -> None:
        """Undo it: nothing was read yet."""


Sample = TypeVar("Sample", bound=Opened)

Indexed = tuple[int, GenerationChunk]

# To admit a sample takes the time of so many tokens of its prompt, each some forty nanoseconds.
_SAMPLE_COST = 1000
_INLINE_COST = 50_000


def new_id(prefix: str, rid: str | None) -> str:
    """The answer's id: the caller's own, else a fresh one."""
    return rid if rid is not None else f"{prefix}-{random_hex(16)}"


def sample_rids(rid: str, num_samples: int) -> list[str]:
    """The engine's names for the samples; aborting `rid` reaches them all."""
    return [rid] if num_samples == 1 else [f"{rid}_{index}" for index in range(num_samples)]


async def open_streams(
    generate: Callable[[GenerationInput], GenerationStream],
    inputs: Sequence[GenerationInput],
    limits: EngineLimits,
) -> list[GenerationStream]:
    """Admit every sample of a request by `generate`, or none: one refusal takes the others back.

    Raises:
        InvalidRequest: what one sample alone is refused for, or the answer might weigh too much.
    """
    check_answer_size(inputs, limits)
    return await open_each(inputs, generate)


async def open_each(
    inputs: Sequence[GenerationInput], open_one: Callable[[GenerationInput], Sample]
) -> list[Sample]:
    """What `open_one` makes of each, or of none; where it takes long, in slices of the loop."""
    if len(inputs) == 1:
        return [open_one(inputs[0])]
    opened: list[Sample] = []
    try:
        async with _slices_for(inputs) as slices:
            for item in inputs:
                opened.append(open_one(item))
                await slices.step()
    except BaseException:
        for each in opened:
            each.take_back()
        raise
    return opened


def _slices_for(inputs: Sequence[GenerationInput]) -> Slices:
    """What to admit them in."""
    cost = sum(_SAMPLE_COST + len(item.input_ids) for item in inputs)
    return Slices(is_long=cost > _INLINE_COST)


def close_all(streams: Sequence[GenerationStream]) -> None:
    """Stop reading; what still runs is aborted."""
    for stream in streams:
        stream.close()


async def merge(streams: Sequence[GenerationStream]) -> AsyncGenerator[Indexed, None]:
    """Chunks of all samples as they come, each with its sample's index.

    Leaving early, or the failure of one sample, ends them all.
    """
    try:
        if len(streams) == 1:
            async for chunk in streams[0]:
                yield 0, chunk
            return
        async with contextlib.aclosing(_merge_many(streams)) as merged:
            async for indexed in merged:
                yield indexed
    finally:
        close_all(streams)


async def _merge_many(streams: Sequence[GenerationStream]) -> AsyncGenerator[Indexed, None]:
    # Nothing is queued: of a stream whose turn has not come the deltas are joined meanwhile.
    ready: deque[int] = deque()
    is_waiting = [False] * len(streams)
    has_ready = asyncio.Event()

    def mark(index: int) -> None:
        if not is_waiting[index]:
            is_waiting[index] = True
            ready.append(index)
            has_ready.set()

    for index, stream in enumerate(streams):
        stream.listen(partial(mark, index))
    num_open = len(streams)
    since = time.monotonic()
    while num_open:
        if not ready:
            has_ready.clear()
            await has_ready.wait()
            since = time.monotonic()
        elif time.monotonic() - since > SLICE_S:
            # All of a large batch may be ready at once.
            await asyncio.sleep(0)
            since = time.monotonic()
        index = ready.popleft()
        is_waiting[index] = False
        chunk = await anext(streams[index])
        num_open -= chunk.finish_reason is not None
        yield index, chunk


async def first_then_rest(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for the first item, then give a generator of all of them.

    A refusal by the scheduler comes as the first thing it says: awaited here, it is still an HTTP
    status and not an event in a stream that began with 200.
    """
    first = await anext(items)

    async def all_items() -> AsyncGenerator[T, None]:
        async with contextlib.aclosing(items):
            yield first
            async for item in items:
                yield item

    return all_items()
