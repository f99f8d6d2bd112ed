"""Converts a chat request to the prompt's token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openai_api.call_ids import IdForm, with_ids
from openai_api.chat_messages import TemplateShape, image_items, template_messages, with_notes
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.chat import ChatCompletionRequest, ChatMessage, ThinkingSwitch
from openai_api.split_tokens import Marks
from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest, TooLong
from runtime.eventloop.heavy_work import aside
from runtime.media.image_loader import NamedItem
from runtime.media.placeholders import expand_text, write_expansions
from runtime.requests.arrival import ARRIVAL, timed
from runtime.requests.image_input import ImageInput
from runtime.text.encoding import MAX_CHARS_PER_TOKEN, check_prompt_length, encode_prompts

# The most characters that are rendered if the server cuts prompts that are too long. Otherwise the
# bound follows from the context length.
MAX_TRUNCATED_CHARS = 64 * 2**20
_MESSAGES = "messages"


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the prompt of the model.

    Attributes:
        text: the rendered text.
        input_ids: the text's token ids.
        is_open: whether the text ends inside reasoning, so that the output begins there.
        may_think: whether the output may contain reasoning; false if the prompt turned it off.
        images: the messages' images, at their positions in `input_ids`.
    """

    text: str
    input_ids: list[int]
    is_open: bool
    may_think: bool = True
    images: list[ImageInput] = field(default_factory=list)


async def build_chat_prompt(request: ChatCompletionRequest, context: OpenAIContext) -> ChatPrompt:
    """Render a checked request with the chat template, and encode the text to token ids.

    Raises:
        InvalidRequest: the model has no template, or the template refuses the messages; the text is
            too long; an image cannot be loaded, or the template does not render images.
    """
    template, tokenizer = context.chat_template, context.service.tokenizer
    tokenizer.check_present()
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Start the server with --chat-template FILE, or use "
            "/v1/completions with a prompt that is formatted already."
        )
    continues = bool(request.continue_final_message)
    if continues and request.messages[-1].role.lower() != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant.",
            param="continue_final_message",
        )
    limits = context.service.client.limits
    if len(request.messages) > limits.context_len and not limits.allow_auto_truncate:
        # Every message takes at least a token. Such a conversation is refused before it is
        # rendered, which could take minutes.
        raise TooLong(
            f"The {len(request.messages)} messages are longer than the model's context length "
            f"({limits.context_len} tokens).",
            param="messages",
        )
    splits = request.split_special_tokens
    if splits is None:
        splits = context.service.config.http.split_special_tokens
    marks = Marks(context.split_tokens) if splits else None
    tools = request.tools if request.tools and request.tool_choice != "none" else None
    with_tools = tools is not None
    max_chars = _max_chars(limits)
    messages, items = await aside(
        request.messages,
        _converted,
        request.messages,
        max_chars,
        TemplateShape(
            form_of=partial(template.content_form, with_tools=with_tools),
            knows_developer=template.choose(with_tools=with_tools).knows_developer,
            sees=context.sees,
        ),
        context.id_form,
    )
    _note_system(messages)
    with timed("render"):
        text = await template.render_async(
            messages,
            tools=tools,
            variables=template_variables(request),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=continues,
            max_chars=max_chars,
            marks=marks,
        )
    if not text:
        raise InvalidRequest(
            "The chat template renders these messages to nothing.", param="messages"
        )
    text = _with_expansions(text, items, context)
    if marks is not None:
        input_ids, text = await marks.encode(text, limits), marks.taken_from(text)
    else:
        # The template writes BOS and similar tokens itself, so the tokenizer must not add them.
        (input_ids,) = await encode_prompts(tokenizer, [text], limits, add_special_tokens=False)
    input_ids, images = await _with_images(input_ids, items, context)
    is_open = _is_open(text, request, context)
    may_think = is_open or _may_think(text, request, context)
    return ChatPrompt(text, input_ids, is_open, may_think, images)


def _note_system(messages: Sequence[dict[str, Any]]) -> None:
    """Store the system message; `/explain_request` tells whether it broke the prefix cache."""
    arrival = ARRIVAL.get()
    if arrival is None or not messages or messages[0].get("role") not in ("system", "developer"):
        return
    content = messages[0].get("content")
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if part.get("text"))
    arrival.system = content if isinstance(content, str) else ""


async def encode_raw(text: str, items: Sequence[NamedItem], context: OpenAIContext) -> ChatPrompt:
    """Encode a prompt that is rendered already and has a placeholder for each image.

    Args:
        text: the prompt.
        items: its images, in order.
        context: the server's context.

    Raises:
        InvalidRequest: the text is too long, an image cannot be loaded, or placeholders and images
            do not match.
    """
    context.service.tokenizer.check_present()
    text = _with_expansions(text, items, context)
    (ids,) = await encode_prompts(
        context.service.tokenizer, [text], context.service.client.limits, add_special_tokens=True
    )
    ids, images = await _with_images(ids, items, context)
    return ChatPrompt(text, ids, is_open=False, images=images)


def _with_expansions(text: str, items: Sequence[NamedItem], context: OpenAIContext) -> str:
    """Return the text with image placeholders written as the tokenizer needs them.

    No image is loaded yet.
    """
    if not items:
        return text
    images = context.service.images
    vision = images.require_vision(items[0].param)
    images.policy.check_count(len(items), _MESSAGES)
    return write_expansions(text, vision, len(items), _MESSAGES)


async def _with_images(
    input_ids: list[int], items: Sequence[NamedItem], context: OpenAIContext
) -> tuple[list[int], list[ImageInput]]:
    if not items:
        return input_ids, []
    images = context.service.images
    loaded = await images.load(items)
    vision = images.require_vision(_MESSAGES)
    input_ids, placed = expand_text(input_ids, loaded, vision, _MESSAGES)
    check_prompt_length(len(input_ids), context.service.client.limits)
    return input_ids, placed


def _converted(
    messages: list[ChatMessage], max_chars: int, shape: TemplateShape, id_form: IdForm | None
) -> tuple[list[dict[str, Any]], list[NamedItem]]:
    """Convert the messages for the template, unless their texts are longer than any prompt.

    The characters are counted first, because joining tens of millions of them would hold the GIL.

    Returns:
        The template's messages, and the images that they show.
    """
    num_chars = 0
    for message in messages:
        if isinstance(message.content, str):
            num_chars += len(message.content)
        elif message.content:
            num_chars += sum(len(part.text) for part in message.content if part.text)
    if num_chars > max_chars:
        raise TooLong(
            f"The texts of the messages are longer than the model's context length allows: they "
            f"have {num_chars} characters.",
            param="messages",
        )
    shown = with_notes(messages, shape)
    return with_ids(template_messages(shown, shape), id_form), image_items(shown)


def _max_chars(limits: EngineLimits) -> int:
    if limits.allow_auto_truncate:
        return MAX_TRUNCATED_CHARS
    return limits.context_len * MAX_CHARS_PER_TOKEN


def template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """Return the template's variables, from all fields of the request that set one."""
    reasoning = request.reasoning
    effort = request.reasoning_effort or (reasoning.effort if reasoning else None)
    enabled = reasoning.enabled if reasoning else None
    if effort is not None:
        enabled = effort != "none"
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = effort
    if enabled is not None:
        variables |= _thinking_variables(enabled)
    if request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    return variables | _switches(request) | (request.chat_template_kwargs or {})


def _switches(request: ChatCompletionRequest) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    thinks = request.thinking
    if isinstance(thinks, ThinkingSwitch):
        if thinks.clear_thinking is not None:
            variables["clear_thinking"] = thinks.clear_thinking
        thinks = {"enabled": True, "disabled": False}.get(thinks.type)
    if request.enable_thinking is not None:
        thinks = request.enable_thinking
    if thinks is not None:
        variables |= _thinking_variables(thinks)
    if request.documents is not None:
        variables["documents"] = request.documents
    return variables


def _thinking_variables(thinks: bool) -> dict[str, Any]:
    # Some families of templates use one of these names for the switch, some the other.
    return {"enable_thinking": thinks, "thinking": thinks}


def _is_open(text: str, request: ChatCompletionRequest, context: OpenAIContext) -> bool:
    parser = context.parsers.reasoning
    if parser is None:
        return False
    open_tag = parser.markers[0]
    if text.rstrip().endswith(open_tag):
        return True
    # A tag elsewhere in the prompt may be quoted text. But in an assistant's message that is
    # continued, the model wrote the tag.
    last = request.messages[-1].content
    return (
        bool(request.continue_final_message)
        and isinstance(last, str)
        and last.rfind(open_tag) > last.rfind(parser.close_tag)
    )


def _may_think(text: str, request: ChatCompletionRequest, context: OpenAIContext) -> bool:
    parser = context.parsers.reasoning
    if parser is None:
        # Without a parser, no part of the output counts as reasoning.
        return False
    variables = template_variables(request)
    if variables.get("enable_thinking") is False or variables.get("thinking") is False:
        return False
    has_thought = text.rstrip().endswith(parser.close_tag)
    return not has_thought and not request.continue_final_message
