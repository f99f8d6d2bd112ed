"""Extras: outputs besides tokens that a request may ask for. This is the form in which they travel.

An extra is a folder with two halves. Its front half defines how it is requested, checked and
answered (`runtime.client.front_extras`), its device half how it is gathered
(`runtime.extras.device_extras`). Code between the halves passes an extra on without decoding it,
and reads only the attributes below.
"""

from __future__ import annotations

from importlib import import_module

import msgspec

# One line per extra: the package with its `front` and its `device` module, loaded on use.
EXTRAS: dict[str, str] = {
    "logprobs": "runtime.extras.logprobs",
    "hidden_states": "runtime.extras.hidden_states",
    "entropy": "runtime.extras.entropy",
    "routed_experts": "runtime.extras.routed_experts",
    "pooled": "runtime.extras.pooled",
    "token_vectors": "runtime.extras.token_vectors",
}


class ExtraSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One extra of a request.

    Attributes:
        name: name in `EXTRAS`.
        params: the request's parameters for the device half, in the extra's own encoding.
        prompt_start: first prompt position to report, -1 for none. The result of the prompt's last
            position comes with the first output token.
        of_outputs: whether each output token is reported. Then every token is sampled, even if a
            grammar leaves only one choice, and one token is sampled even if none is generated.
        replaces: whether each report replaces all earlier ones.
    """

    name: str
    params: bytes = b""
    prompt_start: int = -1
    of_outputs: bool = True
    replaces: bool = False


class ExtraBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An extra's report on consecutive positions of one request.

    Attributes:
        extra: name of the extra.
        is_input: whether the positions are those of the prompt except the last; else they are
            the positions from which output tokens were sampled.
        data: the report, in the extra's own encoding.
        replaces: whether this block replaces earlier blocks of the extra.
        unsent_ids: int32 bytes, the positions' tokens if the output does not include them.
    """

    request_id: int
    extra: str
    is_input: bool
    data: bytes
    replaces: bool = False
    unsent_ids: bytes = b""


def add_block(blocks: list[ExtraBlock], block: ExtraBlock) -> None:
    """Append `block` to a request's blocks, or replace those of its extra."""
    if block.replaces:
        blocks[:] = [each for each in blocks if each.extra != block.extra]
    blocks.append(block)


def load_half(name: str, half: str) -> object:
    """Return `EXTRA` of the module `half` of an extra's package; import it if needed."""
    found: object = import_module(f"{EXTRAS[name]}.{half}").EXTRA
    return found
