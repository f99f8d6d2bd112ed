"""Derives role markup (the texts before and after each turn) from a model's chat template.

The template renders short test conversations, and the texts around their messages are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.lang.chat_template import ChatTemplate, ChatTemplateStyle

Messages = list[dict[str, Any]]
# A function that renders messages. The second argument is whether to begin an assistant's answer
# after them. It returns `None` if the template refuses the messages.
Render = Callable[[Messages, bool], str | None]

_SYSTEM, _QUESTION, _ANSWER, _SECOND, _REPLY, _THIRD = (
    f"Probe{word}Text" for word in ("System", "Question", "Answer", "Second", "Reply", "Third")
)


class _Turns(NamedTuple):
    """The texts before and after the turns of user and assistant."""

    user: tuple[str, str]
    assistant: tuple[str, str]


def derive_chat_template(render: Render, name: str, *, bos_token: str = "") -> ChatTemplate | None:
    """Derive the role markup of a model's own chat template.

    Args:
        render: function that renders a conversation with the template.
        name: name of the resulting `ChatTemplate`.
        bos_token: the token that the server's tokenizer puts before every prompt; it is not part of
            the markup.

    Returns:
        The markup, or `None` if texts before and after each message cannot reproduce the template's
        output. Then the table in `headrace.lang.chat_template` should be used.
    """

    def write(messages: Messages, *, is_open: bool = False) -> str | None:
        text = render(messages, is_open)
        return None if text is None else text.removeprefix(bos_token)

    turns = _find_turns(write)
    if turns is None:
        return None
    found = _add_system(write, turns, name)
    if found is None or not _writes_the_same(write, found):
        return None
    opening = write(_conversation(_QUESTION), is_open=True)
    closed = write(_conversation(_QUESTION))
    if opening is not None and closed is not None and opening.startswith(closed):
        _, suffix = turns.assistant
        prefix = _opening_prefix(opening[len(closed) :], turns.assistant[0])
        found.role_prefix_and_suffix["assistant"] = (prefix, suffix)
    found.image_token = _find_image_token(write) or found.image_token
    return found


def _conversation(*texts: str, system: str | None = None) -> Messages:
    """Return a conversation with these texts as alternating turns of user and assistant."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]


def _split(text: str | None, contents: Sequence[str]) -> list[str] | None:
    """Return the parts of `text` before, between and after `contents`.

    Returns `None` unless each content occurs exactly once, in this order.
    """
    if text is None or any(text.count(content) != 1 for content in contents):
        return None
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def _find_turns(write: Callable[..., str | None]) -> _Turns | None:
    texts = (_QUESTION, _ANSWER, _SECOND, _REPLY, _THIRD)
    parts = _split(write(_conversation(*texts)), texts)
    whole = _split(write(_conversation(*texts[:2])), texts[:2])
    if parts is None or whole is None:
        return None
    user_suffix, assistant_suffix = parts[-1], whole[-1]
    # Some templates end the last turn of a conversation differently from the turns before it.
    if not parts[1].startswith(user_suffix) or not parts[2].startswith(assistant_suffix):
        return None
    return _Turns(
        user=(parts[2][len(assistant_suffix) :], user_suffix),
        assistant=(parts[1][len(user_suffix) :], assistant_suffix),
    )


def _add_system(write: Callable[..., str | None], turns: _Turns, name: str) -> ChatTemplate | None:
    user_prefix = turns.user[0]
    found = ChatTemplate(
        name,
        None,
        {"system": ("", ""), "user": turns.user, "assistant": turns.assistant},
        _stops(turns),
    )
    bare = _split(write(_conversation(_QUESTION)), [_QUESTION])
    if bare is None or not bare[0].endswith(user_prefix):
        return None
    before = bare[0].removesuffix(user_prefix)
    parts = _split(write(_conversation(_QUESTION, system=_SYSTEM)), [_SYSTEM, _QUESTION])
    if parts is None:
        # The template refuses a system turn.
        return None if before else found
    if parts[1].endswith(user_prefix):
        markup = (parts[0], parts[1].removesuffix(user_prefix))
    elif parts[0].startswith(user_prefix):
        found.style = ChatTemplateStyle.LLAMA2
        markup = (parts[0].removeprefix(user_prefix), parts[1])
    else:
        return None
    found.role_prefix_and_suffix["system"] = markup
    if before:
        prefix, suffix = markup
        if len(before) < len(prefix) + len(suffix) or not (
            before.startswith(prefix) and before.endswith(suffix)
        ):
            return None
        # The template writes a system turn even for a conversation without one (Llama 3 does). Its
        # content, which may be empty, is the default system prompt.
        found.default_system_prompt = before[len(prefix) : len(before) - len(suffix)]
    return found


def _find_image_token(write: Callable[..., str | None]) -> str:
    """Return the text that the template writes for an image; empty if it supports none."""
    content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    plain = _split(write(_conversation(_QUESTION)), [_QUESTION])
    parts = _split(write([{"role": "user", "content": content}]), [_QUESTION])
    if plain is None or parts is None or parts[1] != plain[1]:
        return ""
    return parts[0].removeprefix(plain[0]) if parts[0].startswith(plain[0]) else ""


def _stops(turns: _Turns) -> tuple[str, ...]:
    """Return the texts that end an answer: the text after it, or the text before a question."""
    end = turns.assistant[1].strip() or turns.user[0].strip()
    return (end,) if end else ()


def _writes_the_same(write: Callable[..., str | None], found: ChatTemplate) -> bool:
    texts = (_QUESTION, _ANSWER, _SECOND, _REPLY, _THIRD)
    messages = _conversation(*texts)
    default = found.default_system_prompt
    mine = _conversation(*texts, system=default)
    if write(messages) != found.get_prompt(mine):
        return False
    if found.role_prefix_and_suffix["system"] == ("", ""):
        return True
    messages = _conversation(*texts, system=_SYSTEM)
    return write(messages) == found.get_prompt(messages)


def _opening_prefix(opening: str, plain: str) -> str:
    """Return the text with which the template begins an answer that the model continues.

    Some templates write an empty thought there, which keeps the model from thinking. The empty
    thought is part of the result. If the template only opens a thought, the opening tag is not part
    of the result, because the model writes the tag itself.
    """
    thoughts = opening.count("<think>") - opening.count("</think>")
    return opening if opening.startswith(plain) and thoughts <= 0 else plain


def template_from_source(
    source: str | Mapping[str, str], special_tokens: Mapping[str, str], name: str
) -> ChatTemplate | None:
    """Derive the role markup of a Jinja chat template; `None` as in `derive_chat_template`.

    Args:
        source: the template's text, or several texts by name.
        special_tokens: the tokenizer's special tokens by name, such as `bos_token`.
        name: name of the resulting `ChatTemplate`.
    """
    return template_of_model(None, source, special_tokens, name)


def template_of_model(
    option: str | None,
    own: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str],
    name: str,
) -> ChatTemplate | None:
    """Derive the role markup of a server's chat template; `None` as in `derive_chat_template`.

    Args:
        option: the value of the server's option `--chat-template`, if it is set.
        own: the template of the model's folder.
        special_tokens: the tokenizer's special tokens by name, such as `bos_token`.
        name: name of the resulting `ChatTemplate`.
    """
    # Imported only here, so that importing the language does not import Jinja.
    from openai_api.chat_template import load_chat_template
    from openai_api.content_form import in_form
    from runtime.errors import InvalidRequest, StartupError

    try:
        template = load_chat_template(option, own, special_tokens)
    except StartupError:
        return None
    if template is None:
        return None

    def render(messages: Messages, is_open: bool) -> str | None:
        fitting = [
            {
                **message,
                "content": in_form(
                    message["content"], template.content_form(message["role"], with_tools=False)
                ),
            }
            for message in messages
        ]
        try:
            return template.render(fitting, add_generation_prompt=is_open)
        except InvalidRequest:
            return None

    return derive_chat_template(render, name, bos_token=special_tokens.get("bos_token", ""))
