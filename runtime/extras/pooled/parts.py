"""The lengths of a text's parts, which some models need besides the token ids.

They are written in the front process and read in the worker.
"""

from __future__ import annotations

import struct

from runtime.requests.extra_spec import ExtraSpec

NAME = "pooled"
VECTOR = ExtraSpec(NAME, replaces=True)
_PARTS = struct.Struct("<II")


def of_pair(first_tokens: int) -> ExtraSpec:
    """Return the spec for the scores of a pair whose first text has `first_tokens` tokens.

    `first_tokens` is 0 if the model does not need this length.
    """
    return _with_parts(first_tokens, 0)


def behind_prompt(prompt_tokens: int) -> ExtraSpec:
    """Return the spec for a text's vector that excludes the text's first `prompt_tokens` tokens."""
    return _with_parts(0, prompt_tokens)


def parts_of(params: bytes) -> tuple[int, int]:
    """Return the length of a pair's first text, and of the prompt before a text; 0 for none."""
    return _PARTS.unpack(params) if params else (0, 0)


def _with_parts(first_tokens: int, prompt_tokens: int) -> ExtraSpec:
    if not first_tokens and not prompt_tokens:
        return VECTOR
    return ExtraSpec(NAME, _PARTS.pack(first_tokens, prompt_tokens), replaces=True)
