"""Turns the prompts of a native request into token ids, with their images at their positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.media.placeholders import expand_ids, expand_text, write_expansions
from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GeneratePlan, Prompts
from runtime.text.encoding import check_prompt_length

EncodePrompts = Callable[[Prompts], Awaitable[list[list[int]]]]
_PARAM = "image_data"


async def encode_with_images(
    context: ServiceContext, plan: GeneratePlan, encode: EncodePrompts
) -> tuple[list[list[int]], GeneratePlan]:
    """Return token ids of a request's prompts, and the plan with the images in its samples.

    Args:
        context: the server's context.
        plan: a request with images.
        encode: turns prompts into token ids. Its prompts have one placeholder for each image; the
            placeholder is expanded afterwards to the image's number of tokens.

    Raises:
        InvalidRequest: `encode` refuses a prompt; an image cannot be loaded; a prompt's
            placeholders do not match its images.
        TooLong: with its images a prompt is longer than the context or the KV pool.
    """
    vision = context.images.require_vision(_PARAM)
    for items in plan.images:
        context.images.policy.check_count(len(items), _PARAM)
    written = [
        write_expansions(prompt, vision, len(items), _PARAM) if isinstance(prompt, str) else prompt
        for prompt, items in zip(plan.prompts, plan.images, strict=True)
    ]
    # Texts are encoded first, because an error in them is found sooner than one in an image.
    encoded = await encode(cast("Prompts", written))
    loaded = iter(await context.images.load([each for items in plan.images for each in items]))
    prompt_ids: list[list[int]] = []
    placed: list[list[ImageInput]] = []
    for prompt, ids, items in zip(plan.prompts, encoded, plan.images, strict=True):
        images = [next(loaded) for _ in items]
        expand = expand_text if isinstance(prompt, str) else partial(_expand_ids, context)
        expanded, inputs = expand(ids, images, vision, _PARAM)
        check_prompt_length(len(expanded), context.client.limits)
        prompt_ids.append(expanded)
        placed.append(inputs)
    samples = [
        dataclasses.replace(
            each, spec=msgspec.structs.replace(each.spec, images=placed[each.prompt_index])
        )
        for each in plan.samples
    ]
    return prompt_ids, dataclasses.replace(plan, samples=samples)


def _expand_ids(
    context: ServiceContext,
    ids: list[int],
    images: Sequence[PreparedImage],
    vision: VisionSpec,
    param: str,
) -> tuple[list[int], list[ImageInput]]:
    encode = partial(context.tokenizer.encode, add_special_tokens=False)
    return expand_ids(ids, images, vision, encode, param)
