"""The messages about extras: outputs besides tokens that a request may ask for.

An extra is a package with two halves. Its front half defines how the extra is requested, checked
and answered (`runtime.client.front_extras`). Its device half defines how the data is gathered
(`runtime.extras.device_extras`). Code between the halves passes an extra's data on undecoded, and
reads only the attributes below.
"""

from __future__ import annotations

from importlib import import_module

import msgspec

# The package of each extra, with its modules `front` and `device`. They are imported on first use.
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
        name: name in `EXTRAS`.
        params: the request's parameters for the device half, in the extra's own encoding.
        prompt_start: first prompt position to report, -1 for none. The data of the prompt's last
            position comes with the first output token.
        of_outputs: whether each output token is reported. Then every token is sampled, even one
            that a grammar determines. One token is sampled even if the request wants none.
        replaces: whether each report replaces all earlier ones.
    """

    name: str
    params: bytes = b""
    prompt_start: int = -1
    of_outputs: bool = True
    replaces: bool = False


class ExtraBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An extra's data for consecutive positions of one request.

    Attributes:
        request_id: the engine's id of the request.
        extra: name of the extra.
        is_input: whether the positions are in the prompt, without its last one. Else they are the
            positions from which output tokens were sampled.
        data: the extra's data, in its own encoding.
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
    """Append `block` to a request's blocks; if it replaces earlier ones of its extra, drop them."""
    if block.replaces:
        blocks[:] = [each for each in blocks if each.extra != block.extra]
    blocks.append(block)


def load_half(name: str, half: str) -> object:
    """Return the object `EXTRA` of an extra's module `half` (`front` or `device`)."""
    found: object = import_module(f"{EXTRAS[name]}.{half}").EXTRA
    return found
