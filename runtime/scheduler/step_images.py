"""Finds the images in a step's prompt chunks, and decides which of them the tower computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.request import Request
from runtime.step.step_plan import ImageSpan, StepPlan


def why_not_seen(request: Request, cache: ImageCache | None) -> str | None:
    """Return why this server cannot process the images of a request; `None` if it can."""
    if not request.images:
        return None
    if cache is None:
        return "This model takes no images."
    if any(each.start + each.image.num_tokens > request.num_prompt for each in request.images):
        return "An image of the prompt is cut off."
    largest, most = max(each.image.num_tokens for each in request.images), cache.step_tokens
    if most is not None and largest > most:
        return (
            f"An image's {largest} tokens are computed in one step; steps of this server have at"
            f" most {most}."
        )
    return None


def add_images(
    plan: StepPlan,
    parts: Sequence[tuple[Request, int, int]],
    cache: ImageCache,
    ahead: Sequence[PreparedImage] = (),
) -> None:
    """Add to a plan where its prompt chunks have images, and which images it computes and drops.

    Args:
        plan: the step's plan, which has no images yet; changed in place.
        parts: the chunks of `plan.chunk_tokens`, in order: the request, the chunk's first position
            in the sequence, and its number of positions.
        cache: the images whose vectors are on the device.
        ahead: images that this step computes and a later step reads.
    """
    touched: list[PreparedImage] = []
    first = 0
    for request, start, length in parts:
        for image, begin, stop in _between(request, start, start + length):
            digest = image.image.digest
            index = first + begin - start
            plan.image_spans.append(ImageSpan(index, stop - begin, begin - image.start, digest))
            # A prompt that reads an image in several chunks counts it once, in the first chunk.
            is_first_part = begin in (image.start, request.num_computed)
            if is_first_part:
                cache.count_read(digest)
            touched.append(image.image)
        first += length
    plan.image_drops, plan.image_loads = cache.plan([*touched, *ahead], ahead)


class TowerTime:
    """The part of a step's token budget that the image tower may use.

    An image costs as many tokens as it has positions in the prompt: the tower takes about as long
    for the patches behind one position as the decoder takes for that position. Without a limit, a
    burst of images would delay every stream until all of them are computed. A step always computes
    at least one image that it needs, because an image cannot be computed in parts.

    While sequences decode, an image is computed one step before the chunk that reads it. So a
    stream waits in each step for the tower or for the decoder, not for both.

    Attributes:
        ahead: images that this step computes and a later step reads.
    """

    def __init__(self, cache: ImageCache | None, most: int, *, goes_ahead: bool) -> None:
        """Start with the whole share.

        Args:
            cache: images whose vectors exist, so they cost nothing; `None` without images.
            most: most image tokens that the step may compute.
            goes_ahead: compute images one step before the chunks that read them.
        """
        self._cache = cache
        self._left = most
        self._goes_ahead = goes_ahead
        self._computed: set[bytes] = set()
        self.ahead: list[PreparedImage] = []

    def fit(self, request: Request, start: int, length: int, budget: int) -> tuple[int, int]:
        """Shorten a chunk so that the images in it fit into the step.

        Args:
            request: the request whose prompt is computed.
            start: the chunk's first position in the sequence.
            length: the chunk's number of positions.
            budget: number of tokens that the whole step may still compute.

        Returns:
            The number of the chunk's positions that the step computes: all of them, or those before
            an image. And the number of image tokens that the tower computes for them.
        """
        spent = 0
        if self._cache is None:
            return length, 0
        # Number of positions before the first image that is computed for a later step.
        readable = length
        for image, begin, _ in _between(request, start, start + length):
            digest, num_tokens = image.image.digest, image.image.num_tokens
            if digest in self._cache or digest in self._computed:
                continue
            before = begin - start
            is_late = num_tokens > self._left or before + spent + num_tokens > budget
            if self._computed and is_late:
                return min(before, readable), spent
            self._computed.add(digest)
            self._left -= num_tokens
            spent += num_tokens
            if self._goes_ahead and self._cache.may_go_ahead(digest):
                self.ahead.append(image.image)
                readable = min(before, readable)
        return readable, spent


def whole_images(request: Request, start: int, length: int, room: int) -> int:
    """Return the length of a chunk, shortened or extended so that it does not end within an image.

    Args:
        request: the request whose prompt is computed.
        start: the chunk's first position in the sequence.
        length: number of tokens that the budget allows.
        room: number of tokens for which the step has memory.

    Returns:
        `length` if the chunk does not end within an image. Else the number of tokens before that
        image. If the chunk begins within the image, the number of tokens up to the image's end, or
        0 if `room` is smaller.
    """
    for _, begin, stop in _between(request, start, request.num_prompt):
        if begin < start + length < stop:
            if begin > start:
                return begin - start
            return stop - start if stop - start <= room else 0
    return length


def _between(request: Request, start: int, end: int) -> Iterator[tuple[ImageInput, int, int]]:
    """Yield the images that have tokens in `[start, end)`, each with the bounds of these tokens."""
    for image in request.images:
        begin, stop = max(start, image.start), min(end, image.start + image.image.num_tokens)
        if begin < stop:
            yield image, begin, stop
