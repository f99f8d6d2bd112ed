"""Finds the positions of images in a step's prompts, and decides which images are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.request import Request
from runtime.step.step_plan import ImageSpan, StepPlan


def why_not_seen(request: Request, cache: ImageCache | None) -> str | None:
    """Return why the images of a request cannot be computed; `None` if they can."""
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
    """Add a step's positions that stand for images, and decide which vectors are kept.

    Args:
        plan: the step, which has no images yet.
        parts: parts of `plan.chunk_tokens` in order: request, first position, number of positions.
        cache: the images that the executor keeps.
        ahead: images that are computed now and read by a later step.
    """
    touched: list[PreparedImage] = []
    first = 0
    for request, start, length in parts:
        for image, begin, stop in _between(request, start, start + length):
            digest = image.image.digest
            index = first + begin - start
            plan.image_spans.append(ImageSpan(index, stop - begin, begin - image.start, digest))
            # An image that is cut into parts counts in the first one.
            is_first_part = begin in (image.start, request.num_computed)
            if is_first_part:
                cache.count_read(digest)
            touched.append(image.image)
        first += length
    plan.image_drops, plan.image_loads = cache.plan([*touched, *ahead], ahead)


class TowerTime:
    """The tower's share of a step's budget: one prompt token for each token of an image.

    The tower takes about as long for an image token's patches as the decoder takes for that token.
    Without a bound, a burst of images would delay every stream until all of them are computed. One
    image always fits, since it cannot be computed in parts.

    While streams decode, an image is computed one step ahead of the chunk that reads it: streams
    wait for the tower or for the decoder, not for both.

    Attributes:
        ahead: images that this step computes for a later one.
    """

    def __init__(self, cache: ImageCache | None, most: int, *, goes_ahead: bool) -> None:
        """Spend at most `most` tokens on images that are not in `cache`."""
        self._cache = cache
        self._left = most
        self._goes_ahead = goes_ahead
        self._computed: set[bytes] = set()
        self.ahead: list[PreparedImage] = []

    def fit(self, request: Request, start: int, length: int, budget: int) -> tuple[int, int]:
        """Fit a chunk's images into the rest of the step's budget.

        Returns:
            The number of the chunk's positions that fit (all, or those before an image), and the
            number of tokens that the tower computes for them.
        """
        spent = 0
        if self._cache is None:
            return length, 0
        # The positions before the first image that is computed ahead.
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
    """Return the length of a chunk that does not end within an image.

    Args:
        request: the prompt's request.
        start: the chunk's first position.
        length: tokens that the budget allows.
        room: tokens that the step has memory for.

    Returns:
        `length` if that cuts no image; else the tokens before the cut image; if there are none, the
        rest of the image, or 0 if there is no room for it.
    """
    for _, begin, stop in _between(request, start, request.num_prompt):
        if begin < start + length < stop:
            if begin > start:
                return begin - start
            return stop - start if stop - start <= room else 0
    return length


def _between(request: Request, start: int, end: int) -> Iterator[tuple[ImageInput, int, int]]:
    """Yield images with tokens in `[start, end)`, and the bounds of these tokens."""
    for image in request.images:
        begin, stop = max(start, image.start), min(end, image.start + image.image.num_tokens)
        if begin < stop:
            yield image, begin, stop
