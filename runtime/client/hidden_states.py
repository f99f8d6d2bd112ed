"""Hidden states as they reach the endpoints: rows of numbers, bytes until they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest
from runtime.ipc.messages import HiddenBlock, HiddenMode

# What one request may keep in memory; in JSON each number takes some ten to twenty bytes.
MAX_VALUES = 1 << 25

# `return_hidden_states` on the wire.
HiddenSwitch = bool | Literal["last"]


def check_offered(hidden_states: bool) -> None:
    """Refuse a request for them where the server was not started for it.

    Raises:
        InvalidRequest: it was not.
    """
    if not hidden_states:
        raise InvalidRequest(
            "return_hidden_states needs a server that was started with "
            "--enable-return-hidden-states.",
            param="return_hidden_states",
        )


def read_hidden(blocks: Iterable[HiddenBlock], *, is_input: bool) -> list[bytes]:
    """The float32 bytes of every block of the prompt, or of the output, in order."""
    return [block.values for block in blocks if block.is_input == is_input]


def add_block(blocks: list[HiddenBlock], block: HiddenBlock) -> None:
    """Append to a request's blocks, or take the place of them."""
    if block.replaces:
        blocks.clear()
    blocks.append(block)


def check_hidden(
    mode: HiddenMode, num_prompt: int, max_new_tokens: int, limits: EngineLimits
) -> None:
    """Check what needs the prompt's length.

    Raises:
        InvalidRequest: more numbers than one request may ask for.
    """
    num_values = (num_prompt + max_new_tokens) * limits.hidden_size
    if mode == "all" and num_values > MAX_VALUES:
        raise InvalidRequest(
            f"The request asks for up to {num_values} numbers of hidden states, more than "
            f'{MAX_VALUES}: ask for "last", or set max_new_tokens.',
            param="return_hidden_states",
        )
