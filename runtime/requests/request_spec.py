"""The data of a request: `RequestSpec` reaches the scheduler, its `RowSpec` reaches the row."""

from __future__ import annotations

import msgspec

from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.image_input import ImageInput
from runtime.requests.sampling_params import SamplingParams


class RowSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The data that a request's row needs.

    The service makes this struct and the executor reads it. Client, scheduler and planner only pass
    it on. A new per-row field is one more attribute here.

    Attributes:
        sampling: checked parameters (`n` is unrolled by the service: one spec per sample). The
            client fits `max_new_tokens` into the context and sets the seed.
        extras: the requested extras, each name once.
        adapter_id: the front's number of the adapter (LoRA) that the row uses; 0 for none.
    """

    sampling: SamplingParams
    extras: list[ExtraSpec] = []
    adapter_id: int = 0


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sample to generate, without the prompt's tokens.

    Attributes:
        row: data for the row that runs the request.
        rid: the caller's name for the request, unique among the requests in flight.
        stream: whether deltas are sent as they are generated; else one chunk is sent at the end.
        explicit_max_new_tokens: whether the caller set `max_new_tokens`.
        cache_namespace: requests share cached prefixes only within a namespace.
        priority: under the priority policy, requests with a larger one run earlier.
        input_embeds: float32 bytes, one row for each of the prompt's ids, which are then ignored.
        images: the prompt's images at their positions, in order.
        dp_rank: the replica to run on; `None` lets the router choose.
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
        """Size of the pixels of all its images, bytes."""
        return sum(len(each.image.pixels) for each in self.images)
