"""A back end for Anthropic's Messages API; it sends HTTP requests without Anthropic's package."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from headrace.lang.backend.base import AsyncBackend, Generated, Message, Meta, Prompt
from headrace.lang.backend.json_http import JsonHttp
from headrace.lang.backend.turns import choice_messages, choice_schema, chosen, open_text
from headrace.lang.backend.unsupported import UnsupportedArguments
from headrace.lang.chat_template import get_chat_template
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from headrace.lang.core_loop import core
from headrace.lang.program_errors import BackendError
from headrace.lang.sampling import SglSamplingParams

_URL = "https://api.anthropic.com"
_VERSION = "2023-06-01"
_PATH = "/v1/messages"
_TOOL = "answer"
_FINISH = {"max_tokens": "length", "tool_use": "stop", "end_turn": "stop"}


class Anthropic(AsyncBackend):
    """A back end that runs programs on a model of Anthropic's API.

    Several system turns are joined in order, because the API takes one system text. For a JSON
    schema or a `select`, the request has a tool, and the arguments of its call are the answer.
    """

    def __init__(
        self,
        model_name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
        default_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the settings; no connection is opened yet.

        Args:
            model_name: the model's name in the API.
            api_key: defaults to `ANTHROPIC_API_KEY` of the environment.
            base_url: URL of the API without `/v1`; defaults to `ANTHROPIC_BASE_URL` of the
                environment, or else to Anthropic's.
            timeout: the longest time in seconds in which the server may send nothing.
            max_retries: how often a request is sent again after an error that may be temporary.
            default_headers: headers of every request.

        Raises:
            ValueError: no key is given, and the environment has none.
        """
        super().__init__()
        key = api_key or os.environ.get("ANTHROPIC_API_KEY")
        if not key:
            raise ValueError(
                "Anthropic needs a key: pass api_key=, or set ANTHROPIC_API_KEY in the environment."
            )
        self.model_name = model_name
        self.chat_template = get_chat_template("claude")
        self._http = JsonHttp(
            base_url or os.environ.get("ANTHROPIC_BASE_URL") or _URL,
            {"x-api-key": key, "anthropic-version": _VERSION, **(default_headers or {})},
            timeout_s=timeout,
            max_retries=max_retries,
        )
        self._unsupported = UnsupportedArguments("Anthropic", ("top_k", "json_schema"))
        self._warned_of_stops = False

    def get_model_name(self) -> str:
        return self.model_name

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        answer = await self._http.post(_PATH, self._body(s, sampling_params))
        return _content(answer), _meta(answer)

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        meta: Meta = {}
        events = self._http.events(_PATH, {**self._body(s, sampling_params), "stream": True})
        try:
            async for event in events:
                match event["type"]:
                    case "message_start":
                        meta = _meta(event["message"])
                    case "content_block_delta":
                        delta = event["delta"]
                        yield delta.get("text") or delta.get("partial_json") or "", meta
                    case "message_delta":
                        meta = {**meta, **_end(event["delta"], event.get("usage") or {})}
                        yield "", meta
                    case "error":
                        raise BackendError(str(event["error"].get("message", event["error"])))
        finally:
            await events.aclose()

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,  # noqa: ARG002  # the API reports no scores
    ) -> ChoicesDecision:
        """Let the model choose by calling a tool whose argument must be one of `choices`."""
        body = self._request(choice_messages(s, choices, "Anthropic"), 1024)
        body.update(_tool(choice_schema(choices)), temperature=temperature)
        answer = await self._http.post(_PATH, body)
        return ChoicesDecision(chosen(_content(answer), choices), _meta(answer))

    def shutdown(self) -> None:
        """Close the connections."""
        core().call(self._http.close())

    # ---- the body ----

    def _body(self, s: Prompt, params: SglSamplingParams) -> dict[str, Any]:
        self._unsupported.check(params)
        # The model continues the open turn of the assistant; the API refuses white space at its
        # end.
        begun = open_text(s, "Anthropic").rstrip()
        messages = list(s.messages_)
        if begun:
            messages.append({"role": "assistant", "content": begun})
        kwargs = params.to_anthropic_kwargs()
        body = self._request(messages, kwargs.pop("max_tokens") or 128)
        body["stop_sequences"] = self._stops(kwargs.pop("stop_sequences"))
        for name, value in kwargs.items():
            # Newer models refuse `temperature` together with `top_p`. The value 1.0 has no effect,
            # so it is omitted.
            if value is not None and not (name in ("temperature", "top_p") and value == 1.0):
                body[name] = value
        if params.json_schema is not None:
            body.update(_tool(json.loads(params.json_schema)))
        return body

    def _request(self, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        system = "\n\n".join(str(m["content"]) for m in messages if m["role"] == "system")
        body: dict[str, Any] = {
            "model": self.model_name,
            "max_tokens": max_tokens,
            "messages": [
                {"role": message["role"], "content": _wire_content(message["content"])}
                for message in messages
                if message["role"] != "system"
            ],
        }
        if system:
            body["system"] = system
        return body

    def _stops(self, stops: list[str]) -> list[str]:
        kept = [stop for stop in stops if stop.strip()]
        if len(kept) < len(stops) and not self._warned_of_stops:
            self._warned_of_stops = True
            warnings.warn(
                "Anthropic takes no stop strings of white space; the request goes without them.",
                stacklevel=2,
            )
        return kept


def _tool(schema: Any) -> dict[str, Any]:
    tool = {"name": _TOOL, "description": "Give the answer.", "input_schema": schema}
    return {"tools": [tool], "tool_choice": {"type": "tool", "name": _TOOL}}


def _wire_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_wire_part(part) for part in content]


def _wire_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return dict(part)
    head, _, data = part["image_url"]["url"].partition(",")
    media_type = head.removeprefix("data:").removesuffix(";base64")
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


def _content(answer: Mapping[str, Any]) -> str:
    """Return the text of an answer, or the arguments of its tool call as JSON text."""
    text = ""
    for block in answer["content"]:
        if block["type"] == "text":
            text += block["text"]
        elif block["type"] == "tool_use":
            return json.dumps(block["input"], ensure_ascii=False)
    return text


def _meta(answer: Mapping[str, Any]) -> Meta:
    usage = answer.get("usage") or {}
    cached = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return {
        "id": answer.get("id"),
        "prompt_tokens": (usage.get("input_tokens") or 0) + cached + written,
        "cached_tokens": cached,
        **_end(answer, usage),
    }


def _end(answer: Mapping[str, Any], usage: Mapping[str, Any]) -> Meta:
    meta: Meta = {}
    if usage.get("output_tokens") is not None:
        meta["completion_tokens"] = usage["output_tokens"]
    reason = answer.get("stop_reason")
    if reason:
        found = {"type": _FINISH.get(reason, "stop" if reason == "stop_sequence" else reason)}
        if answer.get("stop_sequence"):
            found["matched"] = answer["stop_sequence"]
        meta["finish_reason"] = found
    return meta
