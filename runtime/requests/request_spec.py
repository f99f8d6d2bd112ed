"""A request's data without its prompt: for the scheduler, and for its row of the running batch."""

from __future__ import annotations

import msgspec

from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.image_input import ImageInput
from runtime.requests.sampling_params import SamplingParams


class RowSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The part of a request that the executor needs for the row that runs it.

    The service makes this struct, and the executor reads it. Client, scheduler and planner only
    pass it on, so a new field is added here alone.

    Attributes:
        sampling: checked parameters. `n` is 1, because the service makes one spec for each sample.
            The client fits `max_new_tokens` into the context and sets the seed.
        extras: the requested extras; no name occurs twice.
        adapter_id: number of the adapter (LoRA) that the row uses, given by the front process; 0
            for none.
    """

    sampling: SamplingParams
    extras: list[ExtraSpec] = []
    adapter_id: int = 0


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sample to generate, without the prompt's tokens.

    Attributes:
        row: parameters that the request's row of the running batch needs.
        rid: the caller's name for the request, unique among the requests in flight.
        stream: whether output is sent as it is generated; else all of it is sent at the end.
        explicit_max_new_tokens: whether the caller set `max_new_tokens`.
        cache_namespace: requests share cached prefixes only within a namespace.
        priority: under the priority policy, requests with a greater priority run earlier.
        input_embeds: float32 bytes, one embedding for each of the prompt's ids, which are then
            ignored.
        images: the prompt's images at their positions, in order.
        dp_rank: number of the replica to run on; `None` lets the router choose.
    """

    row: RowSpec
    rid: str = ""
    stream: bool = False
    explicit_max_new_tokens: bool = True
    cache_namespace: str = ""
    priority: int = 0
    input_embeds: bytes = b""
    images: list[ImageInput] = []
    dp_rank: int | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the row."""
        return self.row.sampling

    @property
    def extras(self) -> list[ExtraSpec]:
        """The extras that the row requests."""
        return self.row.extras

    @property
    def num_pixel_bytes(self) -> int:
        """Number of bytes of the pixels of all images in the prompt."""
        return sum(len(each.image.pixels) for each in self.images)
