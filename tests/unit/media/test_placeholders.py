"""Placeholders in texts and in token ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer

from headrace.demo import MODEL_PATH
from runtime.errors import InvalidRequest
from runtime.media.placeholders import expand_ids, expand_text, write_expansions
from runtime.requests.image_input import ImageInput, PreparedImage
from tests.support.pictures import PATCHES, SQUARE

PAD = PATCHES.image_token_id
MARKER_ID, NEWLINES, END = 70, 71, 72
TWO, THREE = (PreparedImage(bytes(16), (3, 28, 28 * n), n, b"") for n in (2, 3))
FOUR = PreparedImage(bytes(16), (3, 112, 112), 4, b"")


def encode(text: str) -> list[int]:
    """Of the square family's texts."""
    if text == SQUARE.marker:
        return [MARKER_ID]
    assert text == SQUARE.expansion
    return [NEWLINES, MARKER_ID, PAD, END, NEWLINES]


def never(text: str) -> list[int]:
    raise AssertionError(text)


def test_texts() -> None:
    two = f"{PATCHES.placeholder} and {PATCHES.placeholder}?"
    assert write_expansions(two, PATCHES, 2, "x") == two
    assert write_expansions(f"{SQUARE.marker}?", SQUARE, 1, "x") == f"{SQUARE.expansion}?"
    for count in (0, 1, 3):
        with pytest.raises(InvalidRequest, match=f"2 placeholders .* {count} images"):
            write_expansions(two, PATCHES, count, "x")


def test_texts_are_tokenized_as_if_every_token_were_written() -> None:
    """With real tokenizers' words around: the line feeds may join with those of the text."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    words = ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|image_pad|>")
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words])

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for vision in (PATCHES, SQUARE):
        own = replace(vision, image_token_id=tokenizer.token_to_id(vision.image_token))
        for text in ("Look:\n\n{0}\n\nand {0}?", "{0}{0}", "a{0}\n"):
            num_images = text.count("{0}")
            images = [FOUR, THREE][:num_images]
            written = text
            for image in images:
                whole = own.expansion.replace(own.image_token, own.image_token * image.num_tokens)
                written = written.replace("{0}", whole, 1)
            given = write_expansions(text.replace("{0}", own.marker), own, num_images, "x")
            ids, _ = expand_text(ids_of(given), images, own, "x")
            assert ids == ids_of(written)


def test_ids_of_texts() -> None:
    ids, placed = expand_text([1, PAD, 2, PAD], [TWO, THREE], PATCHES, "x")
    assert ids == [1, PAD, PAD, 2, PAD, PAD, PAD]
    assert placed == [ImageInput(1, TWO), ImageInput(4, THREE)]
    # Side by side, each is one image's.
    ids, placed = expand_text([PAD, PAD], [TWO, THREE], PATCHES, "x")
    assert (ids, [each.start for each in placed]) == ([PAD] * 5, [0, 2])
    with pytest.raises(InvalidRequest, match="1 placeholders"):
        expand_text([PAD], [], PATCHES, "x")


@pytest.mark.parametrize("written", [1, 3])
def test_ids_that_came_as_ids(written: int) -> None:
    given = [1, *[PAD] * written, 2]
    ids, placed = expand_ids(given, [THREE], PATCHES, never, "x")
    assert ids == [1, PAD, PAD, PAD, 2]
    assert placed == [ImageInput(1, THREE)]


def test_ids_side_by_side() -> None:
    ids, placed = expand_ids([PAD, PAD], [THREE, TWO], PATCHES, never, "x")
    assert (ids, [each.start for each in placed]) == ([PAD] * 5, [0, 3])
    with pytest.raises(InvalidRequest, match=r"2 placeholder tokens .* takes 3"):
        expand_ids([1, PAD, PAD], [THREE], PATCHES, never, "x")
    with pytest.raises(InvalidRequest, match="0 placeholders"):
        expand_ids([1, 2], [THREE], PATCHES, never, "x")
    assert expand_ids([1, 2], [], PATCHES, never, "x") == ([1, 2], [])


def test_ids_of_a_family_with_a_marker() -> None:
    whole = [5, NEWLINES, MARKER_ID, PAD, PAD, PAD, PAD, END, NEWLINES, 6]
    for given in ([5, MARKER_ID, 6], whole):
        ids, placed = expand_ids(given, [FOUR], SQUARE, encode, "x")
        assert ids == whole
        assert placed == [ImageInput(3, FOUR)]
    twice, placed = expand_ids([MARKER_ID, MARKER_ID], [FOUR, FOUR], SQUARE, encode, "x")
    assert twice.count(PAD) == 8
    assert [each.start for each in placed] == [2, 10]
