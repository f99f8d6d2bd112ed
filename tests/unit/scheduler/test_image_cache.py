"""Which images' vectors are kept, and the cache keys of prompts with images."""

from __future__ import annotations

import numpy as np

from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.scheduler.image_cache import ImageCache, cache_keys


def image(name: str, num_tokens: int = 10) -> PreparedImage:
    return PreparedImage(name.encode().ljust(16), (3, 8, 8 * num_tokens), num_tokens, b"")


A, B, C = image("a"), image("b"), image("c")


def test_an_image_is_computed_once_and_the_oldest_is_dropped() -> None:
    cache = ImageCache(200, 10)
    assert cache.plan([A, A]) == ([], [A])
    assert cache.plan([A]) == ([], [])
    assert cache.plan([B]) == ([], [B])
    # Read again, A is younger than B.
    assert cache.plan([A]) == ([], [])
    assert cache.plan([C]) == ([B.digest], [C])
    assert (cache.num_computed, cache.size_bytes) == (3, 200)
    assert [each.digest in cache for each in (A, B, C)] == [True, False, True]


def test_images_of_a_step_are_kept_regardless_of_capacity() -> None:
    cache, large = ImageCache(100, 10), image("large", 50)
    assert cache.plan([A, B, large]) == ([], [A, B, large])
    assert cache.plan([large]) == (sorted([A.digest, B.digest]), [])
    # Once it is not read, there is room for one.
    assert cache.plan([C]) == ([large.digest], [C])
    assert cache.size_bytes == 100
    assert cache.plan([]) == ([], [])


def test_a_forgotten_image_is_dropped_and_computed_again() -> None:
    cache = ImageCache(1000, 10)
    cache.plan([A, B])
    cache.forget([A.digest])
    assert cache.plan([B, A]) == ([A.digest], [A])
    cache.clear()
    assert cache.size_bytes == 0
    assert cache.plan([]) == (sorted([A.digest, B.digest]), [])
    assert cache.plan([A]) == ([], [A])


def test_keys_differ_only_where_images_differ() -> None:
    tokens = np.arange(40, dtype=np.int32)
    assert cache_keys(tokens, []) is tokens
    keys = [cache_keys(tokens, [ImageInput(5, each), ImageInput(20, C)]) for each in (A, A, B)]
    assert np.array_equal(keys[0], keys[1])
    is_same = keys[0] == keys[2]
    assert is_same[:5].all()
    assert is_same[15:].all()
    assert not is_same[5:15].any()
    is_image = np.zeros(40, dtype=bool)
    is_image[5:15] = is_image[20:30] = True
    # No text token has a negative id.
    assert (keys[0] < 0).tolist() == is_image.tolist()
    assert np.array_equal(tokens, np.arange(40))
