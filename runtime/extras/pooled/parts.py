"""The positions where the parts of a text begin, which some models need besides the token ids.

The front writes them and the worker reads them.
"""

from __future__ import annotations

import struct

from runtime.requests.extra_spec import ExtraSpec

NAME = "pooled"
VECTOR = ExtraSpec(NAME, replaces=True)
_PARTS = struct.Struct("<II")


def of_pair(first_tokens: int) -> ExtraSpec:
    """Return a spec for a pair's numbers; its first text has this many tokens, 0 if irrelevant."""
    return _with_parts(first_tokens, 0)


def behind_prompt(prompt_tokens: int) -> ExtraSpec:
    """Return a spec for a text's numbers without its prompt's tokens; 0 to include them."""
    return _with_parts(0, prompt_tokens)


def parts_of(params: bytes) -> tuple[int, int]:
    """Return the lengths of a pair's first text and of a text's prompt; 0 for none."""
    return _PARTS.unpack(params) if params else (0, 0)


def _with_parts(first_tokens: int, prompt_tokens: int) -> ExtraSpec:
    if not first_tokens and not prompt_tokens:
        return VECTOR
    return ExtraSpec(NAME, _PARTS.pack(first_tokens, prompt_tokens), replaces=True)
