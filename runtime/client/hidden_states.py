"""Hidden states as they reach the endpoints: rows of numbers, bytes until they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from runtime.errors import InvalidRequest
from runtime.messages import HiddenBlock

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
