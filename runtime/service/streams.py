"""Several samples of one request, read as one: opened together, merged, closed together."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from runtime.client.generation_stream import GenerationChunk, GenerationInput, GenerationStream

T = TypeVar("T")

Indexed = tuple[int, GenerationChunk]


def new_id(prefix: str, rid: str | None) -> str:
    """The answer's id: the caller's own, else a fresh one."""
    return rid if rid is not None else f"{prefix}-{secrets.token_hex(16)}"


def sample_rids(rid: str, num_samples: int) -> list[str]:
    """The engine's names for the samples; aborting `rid` reaches them all."""
    return [rid] if num_samples == 1 else [f"{rid}_{index}" for index in range(num_samples)]


def open_streams(
    generate: Callable[[GenerationInput], GenerationStream], inputs: Sequence[GenerationInput]
) -> list[GenerationStream]:
    """Admit every sample by `generate`, or none: one refusal takes the others back."""
    streams: list[GenerationStream] = []
    try:
        for item in inputs:
            streams.append(generate(item))  # noqa: PERF401  # those opened must be closed
    except BaseException:
        for stream in streams:
            stream.take_back()
        raise
    return streams


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
    # A small queue: a reader that falls behind makes the streams join their deltas meanwhile.
    queue: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: GenerationStream) -> None:
        try:
            async for chunk in stream:
                await queue.put((index, chunk))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
