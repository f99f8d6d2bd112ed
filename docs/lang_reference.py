"""Makes the reference of the frontend language from its docstrings, for `docs.generate`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import headrace
from headrace.lang.forking import ProgramStateGroup
from headrace.lang.function import SglFunction

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
# The names in each section of the page, in order.
_WORDS = (
    "function gen gen_int gen_string select system user assistant system_begin system_end "
    "user_begin user_end assistant_begin assistant_end image video separate_reasoning "
    "set_default_backend flush_cache get_server_info"
)
_BACKENDS = (
    "RuntimeEndpoint Runtime EngineBackend OpenAI Anthropic LiteLLM RecordingBackend ReplayBackend "
    "BaseBackend AsyncBackend"
)
_ERRORS = "ProgramError BackendError ProgramCancelled ProgramTimeout"


def lang_reference_page() -> str:
    """Return the page: every public name of the language with its docstring."""
    lines = [
        "# The frontend language: reference",
        "",
        "This page lists all names of the frontend language; the tutorial is [lang.md](lang.md). Import the names",
        "from `headrace`, unless a line says otherwise. The state of an `async def` program (`AsyncProgramState`)",
        "has the same methods as `ProgramState`; those that read are awaited.",
        "",
        "## Functions",
        *_functions(_WORDS.split()),
        "",
        "## Programs",
        "",
        "`@function` makes an `SglFunction`, which has these attributes and methods:",
        *_methods(SglFunction, skipped={"call_body", "check_arguments"}),
        "",
        "`run`:",
        *_sections(SglFunction.run),
        "",
        "`run_batch`:",
        *_sections(SglFunction.run_batch),
        "",
        "## States",
        *_methods(headrace.ProgramState),
        "",
        "`fork` returns a `ProgramStateGroup` with these methods:",
        *_methods(ProgramStateGroup),
        "",
        "## Back ends",
    ]
    for name in _BACKENDS.split():
        lines += ["", *_class(name)]
    lines += ["", "## Errors", ""]
    lines += [f"- `{name}`: {_summary(getattr(headrace, name))}" for name in _ERRORS.split()]
    return "\n".join(lines) + "\n"


def _functions(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        found = getattr(headrace, name)
        yield ""
        yield f"`{name}{_signature(found)}`: {_summary(found)}"
        yield from _sections(found)


def _class(name: str) -> Iterator[str]:
    found = getattr(headrace, name)
    yield f"### {name}"
    yield ""
    yield f"`{name}{_signature(found.__init__)}`: {_summary(found)}"
    yield from _sections(found.__init__)


def _methods(kind: type[Any], skipped: Iterable[str] = ()) -> Iterator[str]:
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name in sorted({name for base in kind.__mro__ for name in vars(base)}):
        member = inspect.getattr_static(kind, name)
        if name.startswith("_") or name in skipped or not inspect.getdoc(getattr(kind, name)):
            continue
        text = _cell(_summary(getattr(kind, name)))
        if isinstance(member, property):
            yield f"| `{name}` | {text} |"
        elif inspect.isfunction(member):
            yield f"| `{_cell(name + _signature(member))}` | {text} |"


def _signature(found: Any) -> str:
    parameters = inspect.signature(found).parameters.values()
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in parameters
        if each.name != "self"
    ]
    return str(inspect.Signature(plain))


def _paragraphs(found: Any) -> list[str]:
    return (inspect.getdoc(found) or "").split("\n")


def _summary(found: Any) -> str:
    """Return the text of a docstring before its sections, as one line."""
    words: list[str] = []
    for line in _paragraphs(found):
        if _SECTION.match(line):
            break
        words.append(line.strip())
    return " ".join(" ".join(words).split())


def _sections(found: Any) -> Iterator[str]:
    """Yield the entries of a docstring's sections as lines of a Markdown list."""
    entries: list[str] = []
    section, is_first = "", True
    for line in _paragraphs(found):
        if match := _SECTION.match(line):
            section, is_first = match[1], True
        elif section and line.strip():
            indent = len(line) - len(line.lstrip())
            # `Returns` and `Yields` have one entry, whose lines have the same indent.
            if not is_first and (indent > 4 or section in ("Returns", "Yields")):
                entries[-1] += " " + line.strip()
            else:
                entries.append(_entry(section, line.strip()))
            is_first = False
    if entries:
        yield ""
        yield from entries


def _entry(section: str, text: str) -> str:
    name, _, rest = text.partition(": ")
    if section in ("Args", "Attributes"):
        return f"- `{name}`: {rest}"
    if section == "Raises":
        return f"- raises `{name}`: {rest}"
    return f"- returns: {text}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
