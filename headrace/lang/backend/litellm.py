"""A back end for the providers that the package `litellm` supports."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from headrace.lang.backend.base import AsyncBackend, Generated, Meta, Prompt
from headrace.lang.backend.turns import (
    check_nothing_before,
    choice_messages,
    choice_schema,
    chosen,
)
from headrace.lang.backend.unsupported import UnsupportedArguments
from headrace.lang.chat_template import (
    ChatTemplate,
    find_chat_template,
    get_chat_template,
)
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from headrace.lang.program_errors import BackendError
from headrace.lang.sampling import SglSamplingParams

_HONOURED = ("top_k", "frequency_penalty", "presence_penalty", "json_schema")


class LiteLLM(AsyncBackend):
    """A back end that runs programs on a chat model through LiteLLM.

    The model's name begins with the provider's name, as in `vertex_ai/gemini-pro`.
    """

    def __init__(
        self,
        model_name: str,
        chat_template: ChatTemplate | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = 600.0,
        max_retries: int | None = 3,
        default_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the settings; no connection is opened yet.

        Args:
            model_name: the model's name in LiteLLM.
            chat_template: role markup of `state.text()`; by default chosen by the model's name.
            api_key: the key; defaults to the provider's environment variable.
            organization: the organization of the account.
            base_url: URL of the provider.
            timeout: seconds that a request may take.
            max_retries: how often a failed request is sent again.
            default_headers: headers of every request.

        Raises:
            ImportError: the package `litellm` is missing.
        """
        super().__init__()
        try:
            import litellm
        except ModuleNotFoundError as error:
            if error.name != "litellm":
                raise
            raise ImportError("The LiteLLM back end needs a package: pip install litellm") from None
        self._complete = litellm.acompletion
        self.model_name = model_name
        # Requests send messages, so only `state.text()` uses the markup. For an unknown model name,
        # any markup will do.
        found = chat_template or find_chat_template(model_name)
        self.chat_template = found or get_chat_template("default")
        options = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "timeout": timeout,
            "max_retries": max_retries,
            "extra_headers": dict(default_headers) if default_headers else None,
        }
        self._options = {name: value for name, value in options.items() if value is not None}
        self._unsupported = UnsupportedArguments("LiteLLM", _HONOURED)

    def get_model_name(self) -> str:
        return self.model_name

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        answer = await self._ask(s, sampling_params)
        choice = answer.choices[0]
        return choice.message.content or "", _meta(answer, choice)

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await self._ask(s, sampling_params, **options)
        meta: Meta = {}
        try:
            async for chunk in chunks:
                choice = chunk.choices[0] if chunk.choices else None
                meta = {**meta, **_meta(chunk, choice)}
                yield (choice.delta.content or "" if choice is not None else ""), meta
        except Exception as error:
            raise _said(error) from error
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,  # noqa: ARG002  # the API reports no scores
    ) -> ChoicesDecision:
        """Let the model choose by an answer that must be one of `choices`."""
        schema = json.dumps(choice_schema(choices))
        params = SglSamplingParams(temperature=temperature, json_schema=schema)
        answer = await self._send(choice_messages(s, choices, "LiteLLM"), params)
        choice = answer.choices[0]
        return ChoicesDecision(chosen(choice.message.content or "", choices), _meta(answer, choice))

    async def _ask(self, s: Prompt, params: SglSamplingParams, **options: Any) -> Any:
        self._unsupported.check(params)
        check_nothing_before(s, "LiteLLM")
        return await self._send(s.messages_, params, **options)

    async def _send(self, messages: list[Any], params: SglSamplingParams, **options: Any) -> Any:
        kwargs = {
            name: value for name, value in params.to_litellm_kwargs().items() if value is not None
        }
        if kwargs.get("top_k", 0) <= 0:
            kwargs.pop("top_k", None)
        if params.json_schema is not None:
            wanted = {"name": "answer", "schema": json.loads(params.json_schema)}
            kwargs["response_format"] = {"type": "json_schema", "json_schema": wanted}
        try:
            return await self._complete(
                model=self.model_name,
                messages=list(messages),
                **self._options,
                **kwargs,
                **options,
            )
        except Exception as error:
            # LiteLLM may raise exceptions of many classes, which are converted to `BackendError`.
            raise _said(error) from error


def _said(error: Exception) -> BackendError:
    status = getattr(error, "status_code", None)
    return BackendError(
        str(getattr(error, "message", error)), status=status if isinstance(status, int) else None
    )


def _meta(answer: Any, choice: Any) -> Meta:
    meta: Meta = {"id": getattr(answer, "id", None)}
    usage = getattr(answer, "usage", None)
    if usage is not None:
        details = getattr(usage, "prompt_tokens_details", None)
        meta["prompt_tokens"] = usage.prompt_tokens
        meta["completion_tokens"] = usage.completion_tokens or 0
        meta["cached_tokens"] = getattr(details, "cached_tokens", None) or 0
    if choice is not None and getattr(choice, "finish_reason", None):
        meta["finish_reason"] = {"type": choice.finish_reason}
    return meta
