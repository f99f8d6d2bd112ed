"""Log-probabilities as the endpoints read them: numbers unpacked only for who asked for them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest
from runtime.ipc.messages import LogprobBlock, LogprobSpec

# What one request may keep in memory, here and in its answer.
MAX_VALUES = 4_000_000


@dataclass(slots=True)
class PositionLogprobs:
    """What was asked about one token.

    Attributes:
        logprob: of the token itself.
        top: the most probable tokens, (log-probability, id), in descending order.
        id_values: of the ids that were asked for, in their order.
    """

    logprob: float
    top: list[tuple[float, int]]
    id_values: list[float]


def read_blocks(blocks: Iterable[LogprobBlock], is_input: bool) -> list[PositionLogprobs]:
    """Every position of the input, or of the output, in order."""
    return [each for block in blocks if block.is_input == is_input for each in _read(block)]


def unsent_ids(blocks: Iterable[LogprobBlock]) -> list[int]:
    """Tokens that are reported although they are no part of the output."""
    return [each for block in blocks for each in array("i", block.unsent_ids)]


def _read(block: LogprobBlock) -> list[PositionLogprobs]:
    chosen = _floats(block.chosen)
    if not chosen:
        return []
    top = list(zip(_floats(block.top_values), array("i", block.top_ids).tolist(), strict=True))
    id_values = _floats(block.id_values)
    num_top, num_ids = len(top) // len(chosen), len(id_values) // len(chosen)
    return [
        PositionLogprobs(
            value,
            top[at * num_top : (at + 1) * num_top],
            id_values[at * num_ids : (at + 1) * num_ids],
        )
        for at, value in enumerate(chosen)
    ]


def _floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def check_logprobs(
    spec: LogprobSpec, num_prompt: int, max_new_tokens: int, limits: EngineLimits
) -> None:
    """Check what needs the prompt's length.

    Raises:
        InvalidRequest: a start behind the prompt, an id outside the vocabulary, or more numbers
            than one request may ask for.
    """
    if spec.start_len > num_prompt:
        raise InvalidRequest(
            f"logprob_start_len ({spec.start_len}) is larger than the prompt "
            f"({num_prompt} tokens).",
            param="logprob_start_len",
        )
    for token_id in spec.token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"token_ids_logprob must be in [0, {limits.vocab_size}), got {token_id}.",
                param="token_ids_logprob",
            )
    num_positions = max_new_tokens + (num_prompt - spec.start_len if spec.start_len >= 0 else 0)
    num_values = num_positions * (1 + spec.top_num + len(spec.token_ids))
    if num_values > MAX_VALUES and spec.top_num + len(spec.token_ids):
        raise InvalidRequest(
            f"The request asks for up to {num_values} log-probabilities, more than {MAX_VALUES}: "
            "ask for fewer at each position, or set max_new_tokens.",
            param="top_logprobs_num",
        )
