"""A back end for OpenAI's API, or any server with this API, which uses the package `openai`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.lang.backend.base import AsyncBackend, Generated, Meta, Prompt, TurnPart
from headrace.lang.backend.turns import (
    check_nothing_before,
    choice_messages,
    choice_schema,
    chosen,
    is_closed_object,
    split_turn,
)
from headrace.lang.backend.unsupported import UnsupportedArguments
from headrace.lang.chat_template import ChatTemplate, get_chat_template
from headrace.lang.choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    Entry,
    mean_logprob,
)
from headrace.lang.program_errors import BackendError
from headrace.lang.sampling import SglSamplingParams

# Names of models that accept the token limit only under its newer name, `max_completion_tokens`.
_REASONING_MODEL = re.compile(r"^(o\d|gpt-5)")
_COMPLETION_MODELS = frozenset({"gpt-3.5-turbo-instruct", "davinci-002", "babbage-002"})
_TRIES = 3
_HONOURED = ("n", "frequency_penalty", "presence_penalty", "logit_bias", "sampling_seed")


@dataclass
class TokenUsage:
    """The number of tokens of all requests of a back end."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        """Reset the counts to zero."""
        self.prompt_tokens = self.completion_tokens = 0


class OpenAI(AsyncBackend):
    """A back end that runs programs on a model of OpenAI's chat or completions API.

    Attributes:
        token_usage: number of tokens of all requests so far.
    """

    support_api_speculation = True

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Store the settings; no connection is opened yet.

        Args:
            model_name: the model's name in the API.
            is_chat_model: whether requests send messages (chat) instead of text (completions); by
                default chosen by the model's name.
            chat_template: role markup of `state.text()`; by default the template `default`.
            is_azure: whether to use Azure's client.
            *args: passed to OpenAI's client.
            **kwargs: passed to OpenAI's client: `base_url`, `api_key`, `timeout`, `max_retries`,
                ...

        Raises:
            ImportError: the package `openai` is missing.
            openai.OpenAIError: no key is given and none is in the environment.
        """
        super().__init__()
        try:
            import openai
        except ModuleNotFoundError as error:
            if error.name != "openai":
                raise
            raise ImportError("The OpenAI back end needs a package: pip install openai") from None
        kwargs.setdefault("max_retries", _TRIES)
        kind = openai.AsyncAzureOpenAI if is_azure else openai.AsyncOpenAI
        self._errors = openai
        self._client: Any = kind(*args, **kwargs)
        self.model_name = model_name
        self.is_chat_model = (
            model_name not in _COMPLETION_MODELS if is_chat_model is None else is_chat_model
        )
        self.chat_template = chat_template or get_chat_template("default")
        self.token_usage = TokenUsage()
        own = ("json_schema",) if self.is_chat_model else ("dtype", "return_logprob")
        self._unsupported = UnsupportedArguments("OpenAI", (*_HONOURED, *own))

    def get_model_name(self) -> str:
        return self.model_name

    # ---- generation ----

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        self._unsupported.check(sampling_params)
        if self.is_chat_model:
            check_nothing_before(s, "OpenAI")
            answer = await self._chat(s.messages_, sampling_params)
            texts = [choice.message.content or "" for choice in answer.choices]
        else:
            answer = await self._complete(s.text_, sampling_params)
            texts = [_closed(choice.text, sampling_params) for choice in answer.choices]
        metas = [self._meta(answer, choice) for choice in answer.choices]
        return (texts[0], metas[0]) if len(texts) == 1 else (texts, metas)

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        self._unsupported.check(sampling_params)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat_model:
            check_nothing_before(s, "OpenAI")
            chunks = await self._chat(s.messages_, sampling_params, **options)
        else:
            chunks = await self._complete(s.text_, sampling_params, **options)
        meta: Meta = {}
        # Leaving the block ends the request.
        async with chunks:
            quote = "" if self.is_chat_model else _quote(sampling_params)
            if quote:
                yield quote, meta
            async for chunk in self._told(chunks):
                choice = chunk.choices[0] if chunk.choices else None
                meta = {**meta, **self._meta(chunk, choice)}
                if choice is None:
                    yield "", meta
                else:
                    text = choice.delta.content if self.is_chat_model else choice.text
                    yield text or "", meta
            if quote:
                yield quote, meta

    async def async_fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        """Run all generations of a turn by one request, whose answer `split_turn` divides.

        Raises:
            RuntimeError: in three tries, no answer contained the turn's constants in order.
        """
        gens = [part.sampling_params for part in parts if part.sampling_params is not None]
        params = gens[0].clone()
        params.max_new_tokens = s.num_api_spec_tokens
        # Stop strings end generations within the turn, so they must not end the request.
        params.stop, params.dtype, params.n = None, None, 1
        self._unsupported.check(params)
        text = ""
        for _ in range(_TRIES):
            if self.is_chat_model:
                answer = await self._chat(s.messages_, params)
                text = answer.choices[0].message.content or ""
            else:
                answer = await self._complete(s.text_, params)
                text = answer.choices[0].text
            found = split_turn(text, parts)
            if found is not None:
                meta = self._meta(answer, answer.choices[0])
                # All generations are one request, so only the first reports its token counts.
                metas = [meta, *({"id": meta["id"]} for _ in found[1:])]
                return list(zip(found, metas, strict=True))
        raise RuntimeError(
            f"The model did not follow the turn's pattern in {_TRIES} tries; its last text was "
            f"{text[:200]!r}. Show the pattern in the messages before, or give more "
            "num_api_spec_tokens."
        )

    # ---- selection ----

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """Let the model choose one of `choices`.

        With the chat API, the answer must be one of the choices. With the completions API, the
        choices are scored by their log-probabilities.
        """
        if not self.is_chat_model:
            return await self._select_by_scores(s.text_, choices, choices_method)
        params = SglSamplingParams(
            temperature=temperature, json_schema=json.dumps(choice_schema(choices))
        )
        answer = await self._chat(choice_messages(s, choices, "OpenAI"), params)
        text = answer.choices[0].message.content or ""
        meta = self._meta(answer, answer.choices[0])
        return ChoicesDecision(chosen(text, choices), meta)

    async def _select_by_scores(
        self, text: str, choices: list[str], choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        scored = await self._echo([text + choice for choice in choices])
        entries = [_entries_from(each, len(text)) for each in scored.choices]
        unconditional = None
        if choices_method.requires_unconditional_logprobs:
            alone = await self._echo(choices)
            unconditional = [_entries_from(each, 0) for each in alone.choices]
        decision = choices_method(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(each) for each in entries],
            input_token_logprobs=entries,
            output_token_logprobs=[[] for _ in choices],
            unconditional_token_logprobs=unconditional,
        )
        decision.meta_info.update(self._meta(scored, None))
        return decision

    async def _echo(self, texts: list[str]) -> Any:
        params = SglSamplingParams(max_new_tokens=0, temperature=0.0)
        return await self._complete(texts, params, echo=True, logprobs=0)

    # ---- the API ----

    async def _chat(
        self, messages: Sequence[Any], params: SglSamplingParams, **options: Any
    ) -> Any:
        kwargs = self._kwargs(params)
        if params.json_schema is not None:
            schema = json.loads(params.json_schema)
            wanted = {"name": "answer", "schema": schema}
            if is_closed_object(schema):
                wanted["strict"] = True
            kwargs["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return await self._ask(
            self._client.chat.completions.create, messages=list(messages), **kwargs, **options
        )

    async def _complete(
        self, prompt: str | list[str], params: SglSamplingParams, **options: Any
    ) -> Any:
        kwargs = self._kwargs(params)
        quote = _quote(params)
        if quote:
            prompt = f"{prompt}{quote}"
            kwargs["stop"] = [*kwargs.get("stop", ()), quote]
        if params.return_logprob:
            kwargs["logprobs"] = params.top_logprobs_num or 0
        return await self._ask(self._client.completions.create, prompt=prompt, **kwargs, **options)

    def _kwargs(self, params: SglSamplingParams) -> dict[str, Any]:
        kwargs = {
            name: value for name, value in params.to_openai_kwargs().items() if value is not None
        }
        is_newer = self.is_chat_model and _REASONING_MODEL.match(self.model_name)
        kwargs.pop("max_tokens" if is_newer else "max_completion_tokens", None)
        if params.logit_bias:
            kwargs["logit_bias"] = dict(params.logit_bias)
        if params.sampling_seed is not None:
            kwargs["seed"] = params.sampling_seed
        return {"model": self.model_name, **kwargs}

    async def _ask(self, call: Any, **kwargs: Any) -> Any:
        try:
            return await call(**kwargs)
        except self._errors.APIError as error:
            raise self._said(error) from error

    async def _told(self, chunks: Any) -> AsyncGenerator[Any, None]:
        try:
            async for chunk in chunks:
                yield chunk
        except self._errors.APIError as error:
            raise self._said(error) from error

    @staticmethod
    def _said(error: Any) -> BackendError:
        body = error.body if isinstance(error.body, dict) else {}
        message = str(body.get("message") or error.message)
        request = getattr(error, "request", None)
        url = None if request is None else str(request.url)
        return BackendError(message, status=getattr(error, "status_code", None), url=url)

    def _meta(self, answer: Any, choice: Any) -> Meta:
        meta: Meta = {"id": answer.id}
        usage = answer.usage
        if usage is not None:
            if choice is None or choice is answer.choices[0]:
                self.token_usage.prompt_tokens += usage.prompt_tokens
                self.token_usage.completion_tokens += usage.completion_tokens or 0
            details = getattr(usage, "prompt_tokens_details", None)
            meta["prompt_tokens"] = usage.prompt_tokens
            meta["completion_tokens"] = usage.completion_tokens or 0
            meta["cached_tokens"] = getattr(details, "cached_tokens", None) or 0
        if choice is not None and getattr(choice, "finish_reason", None):
            meta["finish_reason"] = {"type": choice.finish_reason}
        logprobs = getattr(choice, "logprobs", None)
        if logprobs is not None and getattr(logprobs, "tokens", None):
            meta["output_token_logprobs"] = [
                [logprob, None, token]
                for logprob, token in zip(logprobs.token_logprobs, logprobs.tokens, strict=True)
            ]
        return meta

    def shutdown(self) -> None:
        """Close the connections."""
        from headrace.lang.core_loop import core

        core().call(asyncio.wait_for(self._client.close(), 5.0))


def _quote(params: SglSamplingParams) -> str:
    """Return the quote to put around a `dtype=str` text, which the API cannot enforce; else ""."""
    return '"' if params.dtype == "str" else ""


def _closed(text: str, params: SglSamplingParams) -> str:
    quote = _quote(params)
    return f"{quote}{text}{quote}"


def _entries_from(choice: Any, start: int) -> list[Entry]:
    """Return the entries of tokens in an echoed text that end after its first `start` characters.

    Raises:
        BackendError: the server reported no log-probabilities of the prompt.
    """
    found = choice.logprobs
    if found is None or not found.tokens:
        raise BackendError(
            "select needs the prompt's log-probabilities (echo with logprobs), which this server "
            "does not return; with is_chat_model=True it asks for structured output instead."
        )
    offsets = [*found.text_offset[1:], None]
    return [
        [logprob, None, token]
        for logprob, token, end in zip(found.token_logprobs, found.tokens, offsets, strict=True)
        if end is None or end > start
    ]
