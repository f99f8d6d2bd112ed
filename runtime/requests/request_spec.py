"""What a request asks for: one struct from the service that reads it to the row that runs it."""

from __future__ import annotations

import msgspec

from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.image_input import ImageInput
from runtime.requests.sampling_params import SamplingParams


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sample to generate, but for the prompt's tokens.

    Attributes:
        sampling: checked parameters (`n` is unrolled by the service: one spec per sample). The
            client fits `max_new_tokens` into the context and sets the seed.
        rid: the caller's name for it, unique among the requests in flight.
        stream: whether deltas are wanted as they come; else one chunk at the end.
        explicit_max_new_tokens: whether the caller itself named `max_new_tokens`.
        cache_namespace: requests share cached prefixes only inside one namespace.
        priority: larger is sooner under the priority policy.
        extras: what is wanted beside tokens, each name once.
        input_embeds: float32 bytes, one row for each of the prompt's ids, which mean nothing then.
        images: those that the prompt sees, each at its place, in order.
        dp_rank: the replica to run on; `None` leaves it to the router.
    """

    sampling: SamplingParams
    rid: str = ""
    stream: bool = False
    explicit_max_new_tokens: bool = True
    cache_namespace: str = ""
    priority: int = 0
    extras: list[ExtraSpec] = []
    input_embeds: bytes = b""
    images: list[ImageInput] = []
    dp_rank: int | None = None

    @property
    def num_pixel_bytes(self) -> int:
        """What its images weigh."""
        return sum(len(each.image.pixels) for each in self.images)
