"""Images in the prompts of a step: which positions stand for them, and which are computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from runtime.executor.step_plan import ImageSpan, StepPlan
from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.request import Request


def why_not_seen(request: Request, cache: ImageCache | None) -> str | None:
    """Why the images of a request cannot be seen, if they cannot."""
    if not request.images:
        return None
    if cache is None:
        return "This model takes no images."
    if any(each.start + each.image.num_tokens > request.num_prompt for each in request.images):
        return "An image of the prompt is cut off."
    return None


def add_images(
    plan: StepPlan,
    parts: Sequence[tuple[Request, int, int]],
    cache: ImageCache,
    pinned: Collection[bytes],
) -> None:
    """Name the positions of a step that stand for images, and decide which vectors stay.

    Args:
        plan: the step, which has no images yet.
        parts: of `plan.chunk_tokens` in order: a request, its first position, how many.
        cache: what the executor keeps.
        pinned: digests of images that later steps read.
    """
    touched: list[PreparedImage] = []
    first = 0
    for request, start, length in parts:
        for image, begin, stop in _between(request, start, start + length):
            digest = image.image.digest
            place = first + begin - start
            plan.image_spans.append(ImageSpan(place, stop - begin, begin - image.start, digest))
            # Where a prompt is cut, its image counts in the first part.
            is_first_part = begin in (image.start, request.num_computed)
            cache.num_hits += is_first_part and digest in cache
            touched.append(image.image)
        first += length
    plan.image_drops, plan.image_loads = cache.plan(touched, pinned)


def cut_images(request: Request, position: int) -> set[bytes]:
    """Digests of images of which tokens lie on both sides of `position`."""
    return {
        image.image.digest
        for image, begin, _ in _between(request, position, request.num_prompt)
        if begin > image.start
    }


def _between(request: Request, start: int, end: int) -> Iterator[tuple[ImageInput, int, int]]:
    """Images of which tokens lie in `[start, end)`, and the bounds of these tokens."""
    for image in request.images:
        begin, stop = max(start, image.start), min(end, image.start + image.image.num_tokens)
        if begin < stop:
            yield image, begin, stop
