"""Blocks of training sequences of similar length, made by worker processes."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.queues import Queue
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.demo_model.encode import Encoded, Encoder
from recipes.demo_model.tasks import samples

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Sequences are padded to the next of these lengths; without packing, documents stay separate."""


@dataclass(frozen=True)
class Block:
    """`ids` and `targets` are int16 `[rows, length]`; a target of -1 gets no loss."""

    ids: NDArray[np.int16]
    targets: NDArray[np.int16]


def to_block(rows: list[Encoded], length: int) -> Block:
    """Pad `rows` on the right to `length`, with the next id as each position's target."""
    ids = np.zeros((len(rows), length), np.int16)
    targets = np.full((len(rows), length), -1, np.int16)
    for index, row in enumerate(rows):
        count = len(row.ids)
        ids[index, :count] = row.ids
        wanted = np.where(row.mask[1:], row.ids[1:], -1)
        targets[index, : count - 1] = wanted
    return Block(ids, targets)


def blocks(tokenizer: Tokenizer, seed: int, block_tokens: int) -> Iterator[Block]:
    """Yield blocks of about `block_tokens` ids each, without end."""
    encoder, rng, stream = Encoder(tokenizer), Random(seed), samples(seed)
    waiting: dict[int, list[Encoded]] = {length: [] for length in LENGTHS}
    while True:
        for row in encoder.encode(list(islice(stream, 256)), rng):
            if not 2 <= len(row.ids) <= LENGTHS[-1]:
                continue
            length = next(size for size in LENGTHS if size >= len(row.ids))
            waiting[length].append(row)
            if len(waiting[length]) >= max(1, block_tokens // length):
                yield to_block(waiting[length], length)
                waiting[length] = []


def _work(queue: "Queue[Block]", tokenizer_json: str, seed: int, block_tokens: int) -> None:
    """Run the worker process: fill the queue as long as the parent lives."""
    # Each worker uses one core: the tokenizer's threads would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for block in blocks(Tokenizer.from_str(tokenizer_json), seed, block_tokens):
        queue.put(block)


def parallel_blocks(
    tokenizer: Tokenizer, seed: int, block_tokens: int, workers: int
) -> Iterator[Block]:
    """Blocks from `workers` processes with different seeds; from this process if 0."""
    if workers == 0:
        yield from blocks(tokenizer, seed, block_tokens)
        return
    context = multiprocessing.get_context("spawn")
    queue: Queue[Block] = context.Queue(maxsize=64)
    for index in range(workers):
        arguments = (queue, tokenizer.to_str(), seed * 1000 + index, block_tokens)
        context.Process(target=_work, args=arguments, daemon=True).start()
    while True:
        yield queue.get()
