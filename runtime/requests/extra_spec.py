"""Extras: what a request may ask for beside tokens, as it is carried from end to end.

An extra is a folder with two halves. Its front half says how it is asked for, checked and answered
(`runtime.client.front_extras`), its device half how it is gathered
(`runtime.extras.device_extras`). Whoever passes it on between them knows the facts below and opens
nothing.
"""

from __future__ import annotations

from importlib import import_module

import msgspec

# One line an extra: the package with its `front` and its `device` module, loaded on use.
EXTRAS: dict[str, str] = {
    "logprobs": "runtime.extras.logprobs",
    "hidden_states": "runtime.extras.hidden_states",
    "entropy": "runtime.extras.entropy",
    "routed_experts": "runtime.extras.routed_experts",
    "pooled": "runtime.extras.pooled",
    "token_vectors": "runtime.extras.token_vectors",
}


class ExtraSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One extra that a request asks for.

    Attributes:
        name: in `EXTRAS`.
        params: what the device half needs to know of the request; its own encoding.
        prompt_start: first prompt position that is reported, -1 for none. What is found at the
            last position of a prompt comes with the first output token.
        of_outputs: whether something is reported of each output token. Then all of them are
            sampled, also where a grammar leaves no choice, and one where none is to be generated.
        replaces: whether what is reported of a token takes the place of all before.
    """

    name: str
    params: bytes = b""
    prompt_start: int = -1
    of_outputs: bool = True
    replaces: bool = False


class ExtraBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an extra reports of consecutive positions of one request.

    Attributes:
        extra: its name.
        is_input: positions of the prompt but for the last, else what output tokens came from.
        data: its own encoding.
        replaces: whether earlier blocks of this extra mean nothing any more.
        unsent_ids: int32 bytes, the positions' tokens where they are no part of the output.
    """

    request_id: int
    extra: str
    is_input: bool
    data: bytes
    replaces: bool = False
    unsent_ids: bytes = b""


def add_block(blocks: list[ExtraBlock], block: ExtraBlock) -> None:
    """Append to a request's blocks, or take the place of its extra's."""
    if block.replaces:
        blocks[:] = [each for each in blocks if each.extra != block.extra]
    blocks.append(block)


def load_half(name: str, half: str) -> object:
    """`EXTRA` of the module `half` of an extra's package, imported now if it is not yet."""
    found: object = import_module(f"{EXTRAS[name]}.{half}").EXTRA
    return found
