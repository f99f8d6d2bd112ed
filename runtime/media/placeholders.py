"""Finds the placeholders of images in prompts, and repeats each once per vector of its image."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.errors import InvalidRequest
from runtime.requests.image_input import ImageInput, PreparedImage

Encode = Callable[[str], list[int]]


def write_expansions(text: str, vision: VisionSpec, num_images: int, param: str) -> str:
    """Return a prompt's text, with each image's marker replaced by what the tokenizer needs.

    Args:
        text: the prompt's text, with a marker for each image, as the chat template writes it.
        vision: how the model takes images.
        num_images: number of the prompt's images.
        param: the request's field that has the images, for errors.

    Raises:
        InvalidRequest: the number of markers is not `num_images`.
    """
    found = text.count(vision.marker)
    if found != num_images:
        raise _mismatch(vision, found, num_images, param)
    return text.replace(vision.marker, vision.expansion)


def expand_text(
    input_ids: list[int], images: Sequence[PreparedImage], vision: VisionSpec, param: str
) -> tuple[list[int], list[ImageInput]]:
    """Return token ids with a placeholder for each image vector, and the images' positions.

    `input_ids` are the ids of the text that `write_expansions` returned, with one placeholder for
    each image.

    Raises:
        InvalidRequest: the numbers of placeholders and images differ, because the prompt's own text
            contains a placeholder.
    """
    spans = [(at, at + 1) for at in _places(input_ids, vision.image_token_id)]
    if len(spans) != len(images):
        raise _mismatch(vision, len(spans), len(images), param)
    return _expand(input_ids, spans, images, vision.image_token_id)


def expand_ids(
    input_ids: list[int],
    images: Sequence[PreparedImage],
    vision: VisionSpec,
    encode: Encode,
    param: str,
) -> tuple[list[int], list[ImageInput]]:
    """Return what `expand_text` returns, for a prompt of token ids.

    An image's position may be marked by its marker's token, by one placeholder token, or by all of
    its placeholder tokens.

    Args:
        input_ids: the prompt.
        images: the prompt's images, in the order of their positions.
        vision: how the model takes images.
        encode: returns the token ids of a text, without special tokens around it.
        param: the request's field that has the images, for errors.

    Raises:
        InvalidRequest: the number of placeholders does not match.
    """
    placeholder = vision.image_token_id
    if vision.marker != vision.image_token and placeholder not in input_ids:
        (marker,) = encode(vision.marker)
        written = encode(vision.expansion)
        spans = [(at, at + 1) for at in _places(input_ids, marker)]
        for start, end in reversed(spans):
            input_ids = [*input_ids[:start], *written, *input_ids[end:]]
    runs = _runs(input_ids, placeholder)
    if len(runs) != len(images):
        return expand_text(input_ids, images, vision, param)
    for (start, end), image in zip(runs, images, strict=True):
        if end - start not in (1, image.num_tokens):
            raise InvalidRequest(
                f"{param}: {end - start} placeholder tokens ({vision.image_token}) stand in a row, "
                f"and their image takes {image.num_tokens}; one will do.",
                param=param,
            )
    return _expand(input_ids, runs, images, placeholder)


def _expand(
    input_ids: list[int],
    spans: Sequence[tuple[int, int]],
    images: Sequence[PreparedImage],
    placeholder: int,
) -> tuple[list[int], list[ImageInput]]:
    """Replace each span of ids by as many placeholders as its image has vectors."""
    expanded: list[int] = []
    placed: list[ImageInput] = []
    done = 0
    for (start, end), image in zip(spans, images, strict=True):
        expanded += input_ids[done:start]
        placed.append(ImageInput(len(expanded), image))
        expanded += [placeholder] * image.num_tokens
        done = end
    return expanded + input_ids[done:], placed


def _places(input_ids: list[int], token_id: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(ValueError):
        while True:
            found.append(input_ids.index(token_id, found[-1] + 1 if found else 0))
    return found


def _runs(input_ids: list[int], token_id: int) -> list[tuple[int, int]]:
    """Return start and end (exclusive) of each run of the token in consecutive positions."""
    runs: list[tuple[int, int]] = []
    for at in _places(input_ids, token_id):
        if runs and runs[-1][1] == at:
            runs[-1] = runs[-1][0], at + 1
        else:
            runs.append((at, at + 1))
    return runs


def _mismatch(vision: VisionSpec, found: int, num_images: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the prompt has {found} placeholders for images ({vision.placeholder}), and "
        f"{num_images} images came with it; each image needs its own, and no text may spell one "
        "(in chats, split_special_tokens tells them apart).",
        param=param,
    )
