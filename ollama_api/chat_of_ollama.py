"""Converts Ollama's requests to the chat request that the rest of the server uses."""

from __future__ import annotations

from ollama_api.ollama_request import (
    AnswerFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from openai_api.content_parts import Content, image_part, inline_image, note, text_part
from openai_api.schemas.chat import ChatCompletionRequest, ChatMessage, FunctionCall, ToolCall
from runtime.errors import InvalidRequest

_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed"),
    *("presence_penalty", "frequency_penalty"),
)


def chat_of_messages(request: OllamaChatRequest, *, sees: bool) -> ChatCompletionRequest:
    """Return the chat request for `/api/chat`; `sees` says whether the model takes images.

    Raises:
        InvalidRequest: there are images but the model takes none, or `format` is invalid.
    """
    messages = [
        _message(message, f"messages[{index}]", sees)
        for index, message in enumerate(request.messages)
    ]
    chat = ChatCompletionRequest(model=request.model, messages=messages, tools=request.tools)
    _set_answer(chat, request)
    return chat


def chat_of_prompt(request: OllamaGenerateRequest, *, sees: bool) -> ChatCompletionRequest:
    """Return the chat request for `/api/generate`: a system message, if any, and a user message.

    Raises:
        InvalidRequest: there are images but the model takes none, `format` is invalid, or a feature
            needs another kind of model.
    """
    for name in ("suffix", "template", "context"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported by this server.", param=name)
    content = _content("user", request.prompt, request.images, "images", sees)
    messages = [ChatMessage(role="user", content=content)]
    if request.system:
        if request.raw:
            raise InvalidRequest(
                "system cannot be combined with raw: write it into the prompt.", param="system"
            )
        messages.insert(0, ChatMessage(role="system", content=request.system))
    chat = ChatCompletionRequest(model=request.model, messages=messages)
    if request.raw:
        chat.separate_reasoning = False
    _set_answer(chat, request)
    return chat


def _message(message: OllamaMessage, where: str, sees: bool) -> ChatMessage:
    calls = [
        ToolCall(
            id=call.id,
            type="function",
            function=FunctionCall(name=call.function.name, arguments=call.function.arguments),
        )
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=_content(message.role, message.content, message.images, f"{where}.images", sees),
        reasoning_content=message.thinking,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls or None,
    )


def _content(role: str, text: str, images: list[str] | None, where: str, sees: bool) -> Content:
    """Build a message's content; images come before the text, as in Ollama."""
    if not images:
        return text
    # Ollama's API allows only base64.
    if role == "tool" and not sees:
        # A tool may return an image to a model that takes none. The request must not fail then.
        return "\n".join([*[note("image")] * len(images), text])
    parts = [image_part(inline_image(each), where, sees=sees) for each in images]
    return [*parts, text_part(text)]


def _set_answer(chat: ChatCompletionRequest, request: AnswerFields) -> None:
    options = request.options or Options()
    # In Ollama's API, answers are streamed by default.
    chat.stream = request.stream is not False
    for name in _SAME_NAMES:
        setattr(chat, name, getattr(options, name))
    chat.repetition_penalty = options.repeat_penalty
    # As in Ollama, 0 sets no limit.
    if options.num_predict is not None and options.num_predict > 0:
        chat.max_tokens = options.num_predict
    if isinstance(request.format, dict):
        schema = {"name": "answer", "schema": request.format}
        chat.response_format = {"type": "json_schema", "json_schema": schema}
    elif request.format == "json":
        chat.response_format = {"type": "json_object"}
    elif request.format:
        raise InvalidRequest('format must be "json" or a JSON schema.', param="format")
    if isinstance(request.think, str):
        chat.reasoning_effort = request.think
    elif request.think is not None:
        # Families of chat templates use two names for this switch.
        chat.chat_template_kwargs = {"enable_thinking": request.think, "thinking": request.think}
