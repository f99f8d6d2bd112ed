"""Reads `input_embeds` of `/generate`: embeddings that may replace a prompt's tokens."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from runtime.errors import InvalidRequest

Row = list[float | list[float]]


@dataclass(frozen=True)
class Features:
    """Optional features of `/generate`, which depend on the model and on the server's options.

    Attributes:
        hidden_size: length of a token's embedding.
        offered: names of the extra outputs that a server option has enabled. Extra outputs that
            need no option are not listed.
        input_embeds: whether prompts may be embeddings.
        sees: whether the model accepts images.
    """

    hidden_size: int = 0
    offered: frozenset[str] = frozenset()
    input_embeds: bool = False
    sees: bool = False


def read_embeds(given: list[Row], features: Features) -> tuple[list[bytes], bool]:
    """Return the prompts of `input_embeds` as float32 bytes, and whether it is one prompt.

    Args:
        given: one prompt, `[num_tokens][hidden_size]`, or a list of such prompts.
        features: what the server accepts.

    Raises:
        InvalidRequest: the server does not accept embeddings, the shape is wrong, or a number is
            too large.
    """
    if not features.input_embeds:
        raise InvalidRequest(
            "input_embeds needs a server that was started with --disable-radix-cache: a prompt "
            "without tokens cannot be looked up in the prefix cache.",
            param="input_embeds",
        )
    is_one = not (given and given[0] and isinstance(given[0][0], list))
    prompts: list[object] = [given] if is_one else [*given]
    return [_prompt_bytes(rows, features.hidden_size) for rows in prompts], is_one


def _prompt_bytes(rows: object, hidden_size: int) -> bytes:
    if not isinstance(rows, list) or not rows:
        raise InvalidRequest("input_embeds needs at least one row.", param="input_embeds")
    data = bytearray()
    for row in rows:
        try:
            values = array("f", row)
        except TypeError:
            raise InvalidRequest(
                "input_embeds must be a list of rows of numbers, or a list of such lists.",
                param="input_embeds",
            ) from None
        if len(values) != hidden_size:
            raise InvalidRequest(
                f"Each row of input_embeds must have {hidden_size} numbers, got {len(values)}.",
                param="input_embeds",
            )
        # A sum of finite 32-bit numbers is finite in 64 bits. So the sum is not finite only if the
        # row has an infinity or NaN.
        if not math.isfinite(sum(values)):
            raise InvalidRequest("input_embeds must be finite in 32 bits.", param="input_embeds")
        data += values.tobytes()
    return bytes(data)
