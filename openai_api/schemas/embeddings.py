"""The request of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from openai_api.schemas.neutral import neutral
from runtime.requests.sampling_params import Int64


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/embeddings`; unknown keys are ignored.

    Attributes:
        input: a text, texts, token ids, or lists of token ids.
        encoding_format: `float` for lists of numbers, `base64` for their little-endian float32
            bytes.
        prompt: text that is put before each input; an empty one turns the model's default off.
        prompt_name: the name of a prompt in the model's own files, given instead of `prompt`.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    user: Annotated[str | None, neutral("users are not distinguished")] = None
    rid: str | list[str] | None = None
    priority: Int64 = 0


DECODER = msgspec.json.Decoder(EmbeddingRequest)
