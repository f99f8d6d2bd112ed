"""The engine's bounds on a request, and the checks of token ids and images against them.

`EngineClient.admit` uses them to refuse a request that can never fit, before it is queued.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import NamedTuple

from runtime.checkpoint.model_spec import Gives
from runtime.checkpoint.vision_spec import VisionSpec
from runtime.errors import InvalidRequest
from runtime.requests.request_spec import RequestSpec
from runtime.text.encoding import check_prompt_length


@dataclass(frozen=True)
class EngineLimits:
    """The engine's bounds on a request.

    Attributes:
        context_len: most tokens of prompt and output together.
        max_total_num_tokens: capacity of the KV pool, tokens.
        vocab_size: number of logits of a token; every token id is below it.
        allow_auto_truncate: whether a prompt that is too long is cut instead of refused.
        hidden_size: length of a token's embedding and of its hidden state.
        token_size: length of a token's vector, for a model that gives vectors.
        gives: kind of the model's output: tokens, vectors or scores.
        experts_per_token: experts that compute one token, summed over all layers.
        vision: how the model takes images; `None` if it takes none.
    """

    context_len: int
    max_total_num_tokens: int
    vocab_size: int
    allow_auto_truncate: bool = False
    hidden_size: int = 0
    token_size: int = 0
    gives: Gives = "tokens"
    experts_per_token: int = 0
    vision: VisionSpec | None = None

    @property
    def num_least_output(self) -> int:
        """The fewest output tokens for which a prompt must leave room."""
        return 1 if self.gives == "tokens" else 0

    @property
    def longest_kept(self) -> int | None:
        """The length to which an overlong text is cut, keeping its closing token.

        `None` if the closing token is not kept.

        An embedding model may compute a text's vector from its closing token, so the token must
        stay. A text for generation has no closing token.
        """
        return self.context_len if self.allow_auto_truncate and self.gives != "tokens" else None

    @property
    def max_req_len(self) -> int:
        """The most tokens of prompt and output that fit both the context and an empty KV pool."""
        return min(self.context_len, self.max_total_num_tokens)


def pack_token_ids(input_ids: list[int], limits: EngineLimits) -> bytes:
    """Check that token ids are in the vocabulary, and return them as int32 bytes.

    Raises:
        InvalidRequest: there are no ids, or one is outside the vocabulary.
    """
    if not input_ids:
        raise InvalidRequest("input_ids cannot be empty.", param="input_ids")
    wrong = max(input_ids)
    if wrong < limits.vocab_size:
        try:
            # Three times as fast as making an array. A negative id raises `struct.error`.
            return struct.pack(f"={len(input_ids)}I", *input_ids)
        except struct.error:
            wrong = min(input_ids)
    raise InvalidRequest(
        f"input_ids must be in [0, {limits.vocab_size}), got {wrong}.", param="input_ids"
    )


def check_images(input_ids: list[int], spec: RequestSpec, limits: EngineLimits) -> None:
    """Check that the placeholder tokens of a prompt match its images.

    Prompts without images are checked too: a placeholder token in their text would make the model
    look for an image.

    Raises:
        InvalidRequest: a placeholder without an image, or an image without its placeholders.
        TooLong: the prompt is too long. It is not cut, because images cannot be.
    """
    vision, images = limits.vision, spec.images
    if vision is None or spec.input_embeds:
        if images:
            raise InvalidRequest("Images need a model that takes images, and a prompt of tokens.")
        return
    if images:
        check_prompt_length(len(input_ids), dataclasses.replace(limits, allow_auto_truncate=False))
    token_id = vision.image_token_id
    sizes = [(each.start, each.image.num_tokens) for each in images]
    num_placeholders = input_ids.count(token_id)
    if num_placeholders != sum(size for _, size in sizes) or any(
        input_ids[start : start + size].count(token_id) != size for start, size in sizes
    ):
        raise InvalidRequest(
            f"The prompt holds {num_placeholders} placeholder tokens for images "
            f"({vision.image_token}), and {len(images)} images came with it. Each image has its "
            "own placeholders; text that only spells one is told apart in chats with "
            "split_special_tokens.",
            param="input_ids",
        )


class Admitted(NamedTuple):
    """A request that fits into the engine's bounds.

    Attributes:
        input_ids: the prompt, cut if it was too long and the server allows that.
        packed: the prompt's ids as int32 bytes.
        max_new_tokens: the requested number of tokens, or as many as fit.
    """

    input_ids: list[int]
    packed: bytes
    max_new_tokens: int
