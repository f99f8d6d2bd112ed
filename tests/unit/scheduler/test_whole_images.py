"""Chunks of prompts whose images must be computed whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.scheduler.step_images import whole_images

TEXTS = st.integers(0, 9)


def prompt(parts: list[tuple[int, int]]) -> Any:
    """Return what `whole_images` reads of a request: alternating tokens of text and of an image."""
    images, end = [], 0
    for text, num_tokens in parts:
        image = PreparedImage(bytes(16), (3, 1, 1), num_tokens, b"")
        images.append(ImageInput(end + text, image))
        end += text + num_tokens
    return SimpleNamespace(images=images, num_prompt=end + 3)


@given(
    st.lists(st.tuples(TEXTS, st.integers(1, 12)), max_size=4),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(0, 60),
)
def test_chunks_do_not_end_within_an_image(
    parts: list[tuple[int, int]], steps: list[tuple[int, int]], cached: int
) -> None:
    """For any end of the cached prefix and any budget of the steps."""
    request: Any = prompt(parts)
    start, room = min(cached, request.num_prompt - 1), 12
    inside = {
        place
        for each in request.images
        for place in range(each.start + 1, each.start + each.image.num_tokens)
    }
    for time, others in steps:
        wanted = min(time, request.num_prompt - start)
        length = whole_images(request, start, wanted, room - others)
        assert start + length not in inside or length == 0
        # More than the budget only if the chunk holds nothing but an image, and fits.
        assert length <= wanted or length <= room - others
        # A whole step is enough for any image.
        assert length > 0 or others > 0
        start += length
        if start == request.num_prompt:
            return


def test_the_text_before_an_image_comes_first() -> None:
    request = prompt([(5, 10), (0, 4)])
    assert whole_images(request, 0, 9, 12) == 5
    assert whole_images(request, 5, 4, 12) == 10
    assert whole_images(request, 5, 4, 9) == 0
    # After a cached prefix that ends within it.
    assert whole_images(request, 8, 4, 9) == 7
    assert whole_images(request, 5, 12, 12) == 10
    assert whole_images(request, 15, 7, 12) == 7
