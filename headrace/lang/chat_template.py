"""How the turns of a conversation are marked in the text: templates by name and by model."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class ChatTemplateStyle(enum.Enum):
    """Whether a turn's markup depends on the turns before."""

    PLAIN = "plain"
    LLAMA2 = "llama2"


@dataclass
class ChatTemplate:
    """The text before and behind each role's turn.

    Attributes:
        name: by which it is registered.
        default_system_prompt: of a conversation that begins without a system turn.
        role_prefix_and_suffix: by role; a role without an entry has no markup.
        stop_str: what a generation of a turn stops at.
        image_token: stands in the text for an image.
        audio_token: stands in the text for a sound.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: Sequence[str] = field(default=())
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(
        self,
        role: str,
        hist_messages: Sequence[Mapping[str, Any]],
    ) -> tuple[str, str]:
        """The markup of a turn of `role` after `hist_messages`."""
        prefix, suffix = self.role_prefix_and_suffix.get(role, ("", ""))
        if self.style is ChatTemplateStyle.LLAMA2:
            user_prefix = self.role_prefix_and_suffix.get("user", ("", ""))[0]
            if role == "system" and not hist_messages:
                prefix = user_prefix + prefix
            elif (
                role == "user"
                and len(hist_messages) == 1
                and hist_messages[0]["role"] == "system"
                and hist_messages[0]["content"] is not None
            ):
                # The system turn opened the bracket.
                prefix = ""
        return prefix, suffix

    def get_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of whole turns; a system turn without content takes the default prompt."""
        text = ""
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system" and content is None:
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(role, messages[:index])
            text += f"{prefix}{content}{suffix}"
        return text


_TEMPLATES: dict[str, ChatTemplate] = {}
_RULES: list[Callable[[str], str | None]] = []


def register_chat_template(template: ChatTemplate) -> None:
    """Make `template` known by its name; a template of that name is replaced."""
    _TEMPLATES[template.name] = template


def register_chat_template_matching_function(rule: Callable[[str], str | None]) -> Any:
    """Let `rule` name the template of a model's path; rules are asked in order of registration."""
    _RULES.append(rule)
    return rule


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name.

    Raises:
        KeyError: no such name; the message lists those that are known.
    """
    if name not in _TEMPLATES:
        raise KeyError(f"no chat template {name!r}; there are {', '.join(sorted(_TEMPLATES))}")
    return _TEMPLATES[name]


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of the first rule that knows the model, or `default`."""
    for rule in _RULES:
        name = rule(model_path)
        if name is not None:
            return get_chat_template(name)
    return get_chat_template("default")


_CHATML = {
    role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")
}

register_chat_template(
    ChatTemplate(
        name="default",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("SYSTEM:", "\n"),
            "user": ("USER:", "\n"),
            "assistant": ("ASSISTANT:", "\n"),
        },
    )
)
register_chat_template(
    ChatTemplate(
        name="chatml",
        default_system_prompt=None,
        role_prefix_and_suffix=_CHATML,
        stop_str=("<|im_end|>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="qwen",
        default_system_prompt="You are a helpful assistant.",
        role_prefix_and_suffix=_CHATML,
        stop_str=("<|im_end|>",),
    )
)


@register_chat_template_matching_function
def _qwen(model_path: str) -> str | None:
    path = model_path.lower()
    is_chat = "qwen" in path and ("chat" in path or "instruct" in path)
    return "qwen" if is_chat and "llava" not in path else None
