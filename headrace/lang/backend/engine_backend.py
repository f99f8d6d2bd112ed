"""A back end that runs programs on an offline `Engine`, with the same answers as a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.lang.backend.base import AsyncBackend, Generated, Meta, Prompt
from headrace.lang.backend.classic_select import classic_select
from headrace.lang.backend.runtime_endpoint import generate_payload
from headrace.lang.backend.scored_select import decide, select_payload
from headrace.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
)
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from headrace.lang.core_loop import core
from headrace.lang.role_markup import template_of_model
from headrace.lang.sampling import SglSamplingParams

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.lang.media_input import Media

_KEPT_AS = "_lang_backend"


class EngineBackend(AsyncBackend):
    """A back end that runs programs on an offline engine of this process.

    `set_default_backend(engine)` creates this object. The program that created the engine must
    still shut the engine down.

    Attributes:
        engine: the engine on which programs run.
    """

    caches_prefixes = True

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        """Store the engine, and choose the chat template.

        Args:
            engine: a running engine.
            chat_template_name: name of a template to use instead of the model's own.

        Raises:
            KeyError: no template has this name.
        """
        super().__init__()
        self.engine = engine
        self.chat_template = _choose_template(engine, chat_template_name)

    def get_model_name(self) -> str:
        return str(self.engine.server_args.model_path)

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        answer = await self._ask(generate_payload(s, sampling_params))
        if isinstance(answer, list):
            return [one["text"] for one in answer], [one["meta_info"] for one in answer]
        return answer["text"], answer["meta_info"]

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        prompt, options = _call_arguments(generate_payload(s, sampling_params))
        chunks = await self.engine.async_generate(prompt, stream=True, **options)
        # Leaving the block aborts the request.
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk["text_delta"], chunk["meta_info"]

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,  # noqa: ARG002  `select` refuses any value but 0
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        if s.images_:
            # The engine's method `select` does not take images.
            return await classic_select(self._post, s, choices, choices_method)
        prompt, options = _call_arguments(select_payload(s, choices, choices_method))
        answer = await self.engine.async_select(prompt, **options)
        return decide(answer, choices, choices_method)

    async def async_cache_prefix(self, prefix_str: str, media: Sequence[Media] = ()) -> None:
        payload: dict[str, Any] = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        if media:
            payload["image_data"] = [one.data for one in media]
        await self._ask(payload)

    async def async_flush_cache(self) -> bool:
        return bool((await core().threads.call(self.engine.flush_cache)).success)

    async def async_get_server_info(self) -> dict[str, Any] | None:
        return await core().threads.call(self.engine.get_server_info)

    async def _post(self, path: str, payload: dict[str, Any]) -> Any:  # noqa: ARG002  always one
        return await self._ask(payload)

    async def _ask(self, payload: dict[str, Any]) -> Any:
        prompt, options = _call_arguments(payload)
        return await self.engine.async_generate(prompt, progress_bar=False, **options)


def _call_arguments(payload: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    options = dict(payload)
    return options.pop("text", None), options


def _choose_template(engine: Engine, name: str | None) -> ChatTemplate:
    if name is not None:
        return get_chat_template(name)
    arguments, tokenizer = engine.server_args, engine.context.tokenizer
    path = str(arguments.model_path)
    found = None
    if not tokenizer.is_missing:
        found = template_of_model(
            arguments.chat_template, tokenizer.chat_template, tokenizer.named_tokens, path
        )
    return found or get_chat_template_by_model_path(path)


def backend_of(engine: Engine) -> EngineBackend:
    """Return the back end of an engine; the first call creates it and stores it in the engine."""
    found = vars(engine).get(_KEPT_AS)
    if found is None:
        # Two threads may create a back end at the same time; both are usable.
        found = vars(engine)[_KEPT_AS] = EngineBackend(engine)
    return found
