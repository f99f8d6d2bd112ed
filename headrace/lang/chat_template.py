"""A table of role markup: the texts before and after each turn, by the name or path of a model.

The table is used for servers that do not show their chat template. For other servers,
`headrace.lang.role_markup` derives the texts from the template.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

Turns = Sequence[Mapping[str, Any]]
MatchingFunction = Callable[[str], str | None]


class ChatTemplateStyle(enum.Enum):
    """How a system turn is written.

    PLAIN writes it as a separate turn. LLAMA2 writes it inside the first user turn.
    """

    PLAIN = enum.auto()
    LLAMA2 = enum.auto()


@dataclasses.dataclass
class ChatTemplate:
    """The texts with which a model marks the turns of a conversation.

    Attributes:
        name: name of the template.
        default_system_prompt: system prompt of conversations that begin without a system turn;
            `None` if there is none.
        role_prefix_and_suffix: for each role the texts before and after its turns; a role that is
            missing has no such texts.
        stop_str: texts that end the assistant's turn.
        image_token: the text that represents an image in the prompt.
        audio_token: the text that represents a sound in the prompt.
        style: how a system turn is written.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: dict[str, tuple[str, str]]
    stop_str: Sequence[str] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(self, role: str, hist_messages: Turns) -> tuple[str, str]:
        """Return the texts before and after the next turn.

        Args:
            role: the role of the next turn.
            hist_messages: the turns before it, each with `role` and `content`.
        """
        prefix, suffix = self.role_prefix_and_suffix.get(role, ("", ""))
        if self.style is ChatTemplateStyle.LLAMA2:
            user = self.role_prefix_and_suffix.get("user", ("", ""))
            if role == "system" and not hist_messages:
                return user[0] + prefix, suffix
            if (
                role == "user"
                and len(hist_messages) == 1
                and hist_messages[0]["role"] == "system"
                and hist_messages[0]["content"] is not None
            ):
                return "", suffix
        return prefix, suffix

    def get_prompt(self, messages: Turns) -> str:
        """Return the text of a whole conversation.

        A system turn without content gets the template's default system prompt.
        """
        text = ""
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if content is None and role == "system":
                content = self.default_system_prompt
            if content is None:
                continue
            prefix, suffix = self.get_prefix_and_suffix(role, messages[:index])
            text += f"{prefix}{content}{suffix}"
        return text


_templates: dict[str, ChatTemplate] = {}
_matching_functions: list[MatchingFunction] = []
_warned: set[str] = set()


def register_chat_template(template: ChatTemplate) -> None:
    """Register a template under its name; it replaces an earlier template of this name."""
    _templates[template.name] = template


def register_chat_template_matching_function(function: MatchingFunction) -> MatchingFunction:
    """Register a function that finds the template for a model's path; usable as a decorator.

    Registered functions are asked before the built-in rules.

    Args:
        function: takes the path and returns a template's name, or `None` if it knows none.
    """
    _matching_functions.append(function)
    return function


def get_chat_template(name: str) -> ChatTemplate:
    """Return the template with this name.

    Raises:
        KeyError: no template has this name; the message lists the known ones.
    """
    if name not in _templates:
        raise KeyError(
            f"There is no chat template {name!r}; known are {', '.join(sorted(_templates))}."
        )
    return _templates[name]


def find_chat_template(model_path: str) -> ChatTemplate | None:
    """Return the template for a model's name or path, or `None` if no rule matches."""
    for function in _matching_functions:
        name = function(model_path)
        if name is not None:
            return get_chat_template(name)
    for pattern, name in _RULES:
        if pattern.search(model_path):
            return get_chat_template(name)
    return None


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """Return the template for a model's name or path.

    If no rule matches, it logs a warning and returns the template `default`.
    """
    found = find_chat_template(model_path)
    if found is not None:
        return found
    if model_path not in _warned:
        _warned.add(model_path)
        logger.warning(
            "No chat template is known for %r: turns are marked as USER: and ASSISTANT:, which "
            "models answer worse. Name one with chat_template_name.",
            model_path,
        )
    return get_chat_template("default")


def _alike(begin: str, end: str) -> dict[str, tuple[str, str]]:
    """Return markup whose texts are equal for all three roles, except for the role's name.

    `ROLE` in `begin` is replaced by the name of each role.
    """
    roles = ("system", "user", "assistant")
    return {role: (begin.replace("ROLE", role), end) for role in roles}


def _three(
    system: tuple[str, str], user: tuple[str, str], assistant: tuple[str, str]
) -> dict[str, tuple[str, str]]:
    return {"system": system, "user": user, "assistant": assistant}


_PLAIN = ("", "")
_CHATML = _alike("<|im_start|>ROLE\n", "<|im_end|>\n")
_LLAMA_3 = _alike("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>")
_QWEN_SYSTEM = "You are a helpful assistant."
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"  # noqa: RUF001  # the vendor's characters
_DEEPSEEK = _three(
    _PLAIN,
    ("<｜User｜>", ""),  # noqa: RUF001  # the vendor's characters
    ("<｜Assistant｜>", _DEEPSEEK_END),  # noqa: RUF001  # the vendor's characters
)
_MINICPM = _three(("", " "), ("user:", " "), ("assistant:", "</s>"))
_MINICPM_STOPS = ("<|im_end|>", "<|endoftext|>")
_MINICPM_IMAGE = "(<image>./</image>)"
_INTERN_STOPS = ("<|im_end|>", "<|action_end|>")

# The formats that the models' vendors have published.
for _template in (
    ChatTemplate("default", None, _three(("SYSTEM:", "\n"), ("USER:", "\n"), ("ASSISTANT:", "\n"))),
    ChatTemplate("claude", None, _three(_PLAIN, ("\n\nHuman: ", ""), ("\n\nAssistant:", ""))),
    ChatTemplate("chatml", None, _CHATML, ("<|im_end|>",)),
    ChatTemplate("qwen", _QWEN_SYSTEM, _CHATML, ("<|im_end|>",)),
    ChatTemplate(
        "qwen2-vl",
        _QWEN_SYSTEM,
        _CHATML,
        ("<|im_end|>",),
        image_token="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    ChatTemplate("chatml-llava", _QWEN_SYSTEM, _CHATML, ("<|im_end|>",), image_token="<image>\n"),
    ChatTemplate(
        "vicuna_v1.1",
        _VICUNA_SYSTEM,
        _three(("", " "), ("USER:", " "), ("ASSISTANT:", "</s>")),
        image_token=" <image>\n",
    ),
    ChatTemplate(
        "llama-2-chat",
        None,
        _three(("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", " </s><s>")),
        style=ChatTemplateStyle.LLAMA2,
    ),
    ChatTemplate(
        "mistral",
        None,
        _three(
            ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"), ("[INST] ", " [/INST]"), ("", " </s><s>")
        ),
        ("</s>",),
        image_token="[IMG]",
    ),
    ChatTemplate("llama-3-instruct", None, _LLAMA_3, ("<|eot_id|>",), image_token="<|image|>"),
    ChatTemplate(
        "llama-3-instruct-llava", None, _LLAMA_3, ("<|eot_id|>",), image_token="<image>\n"
    ),
    ChatTemplate(
        "llama-4",
        None,
        _alike("<|header_start|>ROLE<|header_end|>\n\n", "<|eot|>"),
        ("<|eot|>",),
        image_token="<|image|>",
    ),
    ChatTemplate("deepseek-v3", None, _DEEPSEEK, (_DEEPSEEK_END,)),
    ChatTemplate("janus", None, _DEEPSEEK, (_DEEPSEEK_END,), image_token="<image_placeholder>\n"),
    ChatTemplate(
        "gemma-it",
        None,
        _three(
            _PLAIN,
            ("<start_of_turn>user\n", "<end_of_turn>\n"),
            ("<start_of_turn>model\n", "<end_of_turn>\n"),
        ),
        image_token="<start_of_image>",
    ),
    ChatTemplate(
        "gemma-4-it",
        None,
        _three(_PLAIN, ("<|turn>user\n", "<turn|>\n"), ("<|turn>assistant\n", "<turn|>\n")),
    ),
    ChatTemplate(
        "glm-4v",
        None,
        _alike("<|ROLE|>\n", "\n"),
        ("<|user|>", "<|endoftext|>", "<|observation|>"),
        image_token="<|image|>",
    ),
    ChatTemplate(
        "granite-3-instruct",
        None,
        _alike("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>"),
        ("<|end_of_text|>",),
    ),
    ChatTemplate(
        "yi-1.5",
        None,
        _three(
            _PLAIN,
            ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            ("", "<|im_end|>\n"),
        ),
        ("<|im_end|>",),
    ),
    ChatTemplate("minicpmv", None, _MINICPM, _MINICPM_STOPS, image_token=_MINICPM_IMAGE),
    ChatTemplate("minicpmo", None, _MINICPM, _MINICPM_STOPS, image_token=_MINICPM_IMAGE),
    ChatTemplate(
        "yi-vl",
        None,
        _three(("", "\n\n"), ("### Human: ", "\n"), ("### Assistant:", "\n")),
        ("###",),
        image_token=" <image_placeholder>\n",
    ),
    ChatTemplate("dbrx-instruct", None, _CHATML, ("<|im_end|>",)),
    ChatTemplate("internvl-2-5", None, _CHATML, _INTERN_STOPS),
    ChatTemplate("interns1", None, _CHATML, _INTERN_STOPS),
    ChatTemplate(
        "c4ai-command-r",
        None,
        _three(
            ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ),
        ("<|END_OF_TURN_TOKEN|>",),
    ),
):
    register_chat_template(_template)

# Rules from a pattern of model paths to a template's name; the first rule that matches is used.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), name)
    for pattern, name in (
        (r"deepseek-(v3|r1)(?!.*base)", "deepseek-v3"),
        (r"orion", "claude"),
        (r"janus", "janus"),
        (r"dbrx.*instruct", "dbrx-instruct"),
        (r"vicuna|llava-v?1\.5|llava-next-video-7b", "vicuna_v1.1"),
        (r"llama-2.*chat|codellama.*instruct", "llama-2-chat"),
        (r"pixtral|(mistral|mixtral).*instruct", "mistral"),
        (r"llama-4", "llama-4"),
        (r"llama-3.*instruct", "llama-3-instruct"),
        (r"tinyllama", "chatml"),
        (r"qwen.*vl", "qwen2-vl"),
        (r"glm[-_]?4(\.\d+)?v", "glm-4v"),
        # Qwen 3's template adds no system turn, and the names of its chat models lack "instruct".
        (r"qwen-?3(?!.*base)(?!.*embedding)", "chatml"),
        (r"qwen(?!.*llava).*(chat|instruct)(?!.*llava)", "qwen"),
        (r"llava-v?1\.6-34b|llava.*34b|llava-onevision-qwen2", "chatml-llava"),
        (r"yi-vl", "yi-vl"),
        (r"yi-1\.5.*chat", "yi-1.5"),
        (r"gemma-4.*it", "gemma-4-it"),
        (r"gemma.*it|gemma-3", "gemma-it"),
        (r"minicpm-?v", "minicpmv"),
        (r"minicpm-?o", "minicpmo"),
        (r"command-r", "c4ai-command-r"),
        (r"granite.*instruct", "granite-3-instruct"),
        (r"internvl2_5", "internvl-2-5"),
        (r"intern-?s1", "interns1"),
    )
)
