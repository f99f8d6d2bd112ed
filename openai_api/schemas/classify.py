"""The request of `/v1/classify`."""

from __future__ import annotations

import msgspec

from runtime.requests.sampling_params import Int64


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/classify`; unknown keys are ignored.

    Attributes:
        input: a text, texts, token ids, or lists of token ids.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    user: str | None = None
    rid: str | list[str] | None = None
    priority: Int64 = 0


DECODER = msgspec.json.Decoder(ClassifyRequest)
