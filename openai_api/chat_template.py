"""Renders messages to the prompt's text by a model's chat template, as `transformers` does."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from jinja2 import nodes

from openai_api.call_shapes import call_shapes
from openai_api.content_form import ContentForm, Forms, can_read_parts, find_forms
from openai_api.template_check import find_doubt
from openai_api.template_process import LIMITS, Job, TemplateProcess, raise_error
from openai_api.template_render import (
    RENDER_TIMEOUT_S,
    CompiledTemplate,
    RenderTimeout,
    parse_template,
)
from runtime.errors import HeadraceError, InvalidRequest, StartupError, TooLong
from runtime.eventloop.offload import OffloadPool

if TYPE_CHECKING:
    from openai_api.split_tokens import Marks

logger = logging.getLogger(__name__)

# Two threads: rendering holds the GIL, so more threads would only compete with the event loop.
_RENDERING = OffloadPool(
    "rendering of the chat template", workers=2, max_queued=16_384, timeout_s=120.0
)

# Messages of up to this many characters are rendered on the event loop, if rendering takes no
# longer than `_INLINE_S` seconds. A value that is not text counts as `_CHARS_PER_VALUE` characters.
_INLINE_CHARS = 32 * 1024
_CHARS_PER_VALUE = 128
_INLINE_S = 0.005

# A process with limits, for templates that might use much time or memory. The first such template
# starts it.
_PROCESS = TemplateProcess()

# Variables that the server sets. A request's `chat_template_kwargs` cannot replace them.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "return_tensors",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "raise_exception",
        "strftime_now",
    }
)
# Words in the prompts that reranking models were trained with.
_YES_OR_NO = 'can only be "yes" or "no"'
# Templates that `--chat-template` can name, and their files.
NAMED_TEMPLATES = {
    "chatml": "chatml.jinja",
    "llama-3": "llama_3.jinja",
    "gemma": "gemma.jinja",
    "qwen3-reranker": "qwen3_reranker.jinja",
}
# The most characters of a prompt that is rendered only to find how a template reads content.
_PROBE_CHARS = 200_000
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Compiled:
    """One compiled template.

    Attributes:
        variables: names of the variables that the template reads.
        can_read_parts: whether the template may read a message's content as a list of parts.
        knows_developer: whether the template renders the role `developer`.
        written: the template's text constants, in the order of the source.
        doubt: why the template is rendered in a process with limits; `None` if it is harmless.
    """

    def __init__(self, source: str, name: str) -> None:
        # The template is examined before it is compiled, because compiling evaluates constant
        # expressions, which may take any time.
        tree = parse_template(source, name)
        self.can_read_parts = can_read_parts(tree)
        self.written = "".join(_texts(tree))
        self.knows_developer = "developer" in source
        self.doubt = find_doubt(tree)
        self._template: CompiledTemplate | None = None
        if self.doubt is None:
            self._template = CompiledTemplate(source, name)
            self.variables = self._template.variables
            return
        logger.info(
            "The chat template (%s) is rendered in a process with limits: %s", name, self.doubt
        )
        self._job = Job(source, name)
        found = _PROCESS.ask(self._job)
        if found.error_kind == "startup":
            raise StartupError(found.error)
        if found.error:
            raise StartupError(
                f"The chat template ({name}) cannot be compiled within {LIMITS.cpu_s:g} s and "
                f"{LIMITS.memory_bytes >> 20} MiB: {self.doubt}."
            )
        self.variables = set(found.variables)

    def render(self, values: dict[str, Any], max_chars: int, timeout_s: float) -> str | None:
        """Return the prompt; `None` if the template fails on the type of a value.

        A harmless template is rendered here, any other in a process with limits.
        """
        if self._template is not None:
            return self._template.render(values, max_chars, timeout_s)
        job = Job(self._job.source, self._job.name, values, max_chars)
        rendered = _PROCESS.ask(job)
        raise_error(rendered)
        return rendered.text


class ChatTemplate:
    """The chat template of a model, or its several named templates, compiled once.

    Attributes:
        text: source of the default template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        """Compile the templates.

        Args:
            source: the template's source, or several sources by name (`default`, `tool_use`).
            special_tokens: `bos_token`, `eos_token` and the like, for those that exist.
            timeout_s: how long rendering in this process may take, seconds.

        Raises:
            StartupError: a source is not a Jinja template.
        """
        texts = {"default": source} if isinstance(source, str) else dict(source)
        if not texts:
            raise StartupError("The model's list of chat templates is empty.")
        self.text = texts.get("default") or next(iter(texts.values()))
        self._compiled = {name: _Compiled(text, name) for name, text in texts.items()}
        self._special_tokens = dict(special_tokens or {})
        self._timeout_s = timeout_s
        self._forms = {
            with_tools: self._find_forms(with_tools=with_tools) for with_tools in (False, True)
        }

    def content_form(self, role: str, *, with_tools: bool) -> ContentForm:
        """Return the form in which the template reads the content of `role`'s messages."""
        forms = self._forms[with_tools]
        if not forms:
            # The template cannot read parts, or refuses all messages that it was tried with.
            reads_parts = self.choose(with_tools=with_tools).can_read_parts
            return ContentForm.EITHER if reads_parts else ContentForm.TEXT
        # A role that the template does not render is treated as a user.
        return forms.get(role) or forms.get("user", ContentForm.EITHER)

    def describe_content(self) -> str:
        """Return a description of the content's forms by role, for the log."""
        described = [_described(self._forms[with_tools]) for with_tools in (False, True)]
        if described[0] == described[1]:
            return described[0]
        return f"{described[0]}; with tools: {described[1]}"

    def _find_forms(self, *, with_tools: bool) -> Forms:
        compiled = self.choose(with_tools=with_tools)
        if not compiled.can_read_parts:
            return {}

        def render(
            messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
        ) -> str | None:
            try:
                return self.render(messages, tools=tools, max_chars=_PROBE_CHARS)
            except HeadraceError:
                return None

        return find_forms(render, with_tools=with_tools)

    @property
    def asks_yes_or_no(self) -> bool:
        """Whether the template asks the model if a document answers a query, yes or no."""
        return "document" in self.text and _YES_OR_NO in self.text

    def choose(self, *, with_tools: bool) -> _Compiled:
        """Return the template for conversations with or without tools, if the model has several."""
        if with_tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        return self._compiled.get("default") or next(iter(self._compiled.values()))

    @property
    def shows_tools(self) -> bool:
        """Whether the template renders tools."""
        return "tools" in self.choose(with_tools=True).variables

    @property
    def written(self) -> str:
        """Text constants of the template for conversations with tools, in the source's order."""
        return self.choose(with_tools=True).written

    @property
    def written_by_all(self) -> str:
        """Text constants of all templates of the model."""
        return "\n".join(compiled.written for compiled in self._compiled.values())

    async def render_async(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render as `render` does, on a thread if it may take long, so that streams continue.

        Switching to a thread takes longer than most renderings, so a small one is tried on the
        event loop first. If it is slow nevertheless (nested loops, which is rare), it is repeated
        on a thread.
        """
        tools, marks = options.get("tools"), options.get("marks")
        given = (messages, tools, options.get("variables"))
        is_harmless = self.choose(with_tools=bool(tools)).doubt is None
        if is_harmless and marks is None and _is_small(given):
            with contextlib.suppress(RenderTimeout):
                return self.render(messages, **options, timeout_s=_INLINE_S)
        return await _RENDERING.run(self.render, messages, **options)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int = 10_000_000,
        marks: Marks | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Render the prompt.

        Args:
            messages: role, content and so on. Contents have the form that the template reads.
            tools: function descriptions as in OpenAI's `tools`.
            variables: the request's `chat_template_kwargs`; unknown ones are ignored.
            add_generation_prompt: whether the prompt ends with the beginning of the assistant's
                turn.
            continue_final_message: whether the prompt ends inside the last message instead.
            max_chars: the longest text that can be a prompt of the model.
            marks: put around the request's texts, so that they are found in the rendered text.
            timeout_s: seconds that rendering may take; by default the template's own limit.

        Raises:
            InvalidRequest: the template refuses these messages, or a variable is reserved.
            RenderTimeout: rendering took too long.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        compiled = self.choose(with_tools=bool(tools))
        extra = allowed_variables(variables or {}, compiled.variables)
        if marks is not None:
            messages = marks.put_into_messages(messages)
            tools, extra = marks.put_into(tools), marks.put_into(extra)
        if continue_final_message:
            messages = [*messages[:-1], _tagged(messages[-1])]
        values = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _first_rendered(compiled, values, tools, max_chars, timeout_s)
        if text is None:
            raise InvalidRequest(
                "The chat template cannot render these messages: it expects another shape.",
                param="messages",
            )
        return _cut_at_tag(text) if continue_final_message else text


def _first_rendered(
    compiled: _Compiled,
    values: Mapping[str, Any],
    tools: list[dict[str, Any]] | None,
    max_chars: int,
    timeout_s: float,
) -> str | None:
    """Render the conversation with the first form of calls and tools that the template accepts.

    Raises:
        InvalidRequest: the template accepts none; the message is the error of the first one.
        RenderTimeout: the time was too short to try all of them.
    """
    refusal: InvalidRequest | None = None
    deadline = time.monotonic() + timeout_s
    for messages in call_shapes(values["messages"]):
        for shown in _tool_shapes(tools):
            if refusal is not None and time.monotonic() > deadline:
                # On the event loop the time is short; the caller then repeats this on a thread.
                raise RenderTimeout(refusal.message, param=refusal.param)
            given = {**values, "messages": messages, "tools": shown}
            try:
                text = compiled.render(given, max_chars, deadline - time.monotonic())
            except (TooLong, RenderTimeout):
                raise
            except InvalidRequest as error:
                refusal = refusal or error
            else:
                if text is not None:
                    return text
    if refusal is not None:
        raise refusal
    return None


def _tool_shapes(tools: list[dict[str, Any]] | None) -> list[list[dict[str, Any]] | None]:
    """Return tools in OpenAI's wrapping, and as bare functions, which some templates expect."""
    return [tools, [tool.get("function", tool) for tool in tools]] if tools else [tools]


def _is_small(value: Any) -> bool:
    """Whether rendering `value` (dicts, lists and texts) takes a fraction of a millisecond."""
    num_chars = 0
    stack: list[Any] = [value]
    while stack:
        part = stack.pop()
        kind = type(part)
        num_chars += len(part) if kind is str else _CHARS_PER_VALUE
        if num_chars > _INLINE_CHARS:
            return False
        if kind is dict:
            stack += part.values()
        elif kind is list or kind is tuple:
            stack += part
    return True


def allowed_variables(given: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    """Return those of the request's variables that the template reads.

    Args:
        given: the request's variables.
        read: names of the variables that the template reads.

    Raises:
        InvalidRequest: a variable is reserved for the server, or documents are not objects.
    """
    if not given:
        return {}
    documents = given.get("documents") or []
    if not (isinstance(documents, list) and all(isinstance(each, dict) for each in documents)):
        raise InvalidRequest(
            "documents must be a list of objects, each with the keys that the chat template reads "
            "(mostly title and text).",
            param="documents",
        )
    for name in given:
        if name in RESERVED or name.startswith("_"):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {name[:64]!r}.", param="chat_template_kwargs"
            )
    return {name: value for name, value in given.items() if name in read}


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if "text" in part:
                part["text"] += _CONTINUE_TAG
                break
        return {**message, "content": parts}
    return {**message, "content": f"{content or ''}{_CONTINUE_TAG}"}


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise InvalidRequest(
            "The chat template drops the last message's text, so it cannot be continued.",
            param="continue_final_message",
        )
    kept = text[:at]
    # If the space at the end of the tag is gone, the template trims its messages, so the kept text
    # is trimmed too.
    return kept if text.startswith(_CONTINUE_TAG, at) else kept.rstrip()


def _described(forms: Forms) -> str:
    if not forms:
        return "text"
    roles = {form: [role for role in forms if forms[role] is form] for form in ContentForm}
    return ", ".join(f"{form} ({' '.join(found)})" for form, found in roles.items() if found)


def _texts(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        if isinstance(node, nodes.TemplateData):
            yield node.data
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value


def load_chat_template(
    option: str | None,
    own: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str],
) -> ChatTemplate | None:
    """Load the template of `--chat-template`, or else the tokenizer's own template.

    Args:
        option: the option's value: a file, a name of `NAMED_TEMPLATES`, or a template's source.
        own: the tokenizer's template, or several by name.
        special_tokens: `bos_token`, `eos_token` and the like, for those that exist.

    Returns:
        `None` if the model has no template; then only `/v1/completions` and `/generate` serve the
        model.

    Raises:
        StartupError: the option is neither a file nor a name nor a template.
    """
    if option is None:
        return ChatTemplate(own, special_tokens) if own else None
    if "{%" in option or "{{" in option:
        return ChatTemplate(option, special_tokens)
    path = Path(option)
    if option in NAMED_TEMPLATES:
        path = Path(__file__).with_name("templates") / NAMED_TEMPLATES[option]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise StartupError(
            f"--chat-template {option}: no such file, none of {', '.join(NAMED_TEMPLATES)}, and "
            "the text is not a Jinja template."
        ) from None
    if option.endswith(".json"):
        try:
            text = orjson.loads(text)["chat_template"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise StartupError(f"--chat-template {option}: no key 'chat_template' in it.") from None
    return ChatTemplate(text, special_tokens)
