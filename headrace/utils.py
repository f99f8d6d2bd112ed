"""Helper functions under the names of SGLang's module, which users' notebooks import."""

from __future__ import annotations

import functools
import html
import importlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from headrace.http_calls import download_and_cache_file, http_request
from headrace.media import encode_frame, encode_image_base64, encode_video_base64
from headrace.server_process import (
    execute_shell_command,
    launch_server_cmd,
    release_port,
    reserve_port,
    terminate_process,
    wait_for_http_ready,
    wait_for_server,
)
from headrace.streaming import async_stream_and_merge, stream_and_merge, trim_overlap

__all__ = [
    "LazyImport",
    "TypeBasedDispatcher",
    "async_stream_and_merge",
    "convert_json_schema_to_str",
    "download_and_cache_file",
    "dump_state_text",
    "encode_frame",
    "encode_image_base64",
    "encode_video_base64",
    "execute_once",
    "execute_shell_command",
    "find_printable_text",
    "get_exception_traceback",
    "http_request",
    "info_once",
    "is_in_ci",
    "is_same_type",
    "launch_server_cmd",
    "print_highlight",
    "read_jsonl",
    "release_port",
    "reserve_port",
    "resolve_obj_by_qualname",
    "stream_and_merge",
    "terminate_process",
    "trim_overlap",
    "wait_for_http_ready",
    "wait_for_server",
]

P = ParamSpec("P")
logger = logging.getLogger(__name__)

_CI_VARIABLES = ("HEADRACE_IS_IN_CI", "SGLANG_IS_IN_CI")
# The ranges of CJK ideographs in Unicode, including extensions and compatibility ideographs.
_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2CEB0, 0x2EBEF),
    (0x30000, 0x323AF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def is_in_ci() -> bool:
    """Whether a build runs this notebook, according to an environment variable."""
    return any(os.environ.get(name, "").lower() in ("1", "true") for name in _CI_VARIABLES)


def print_highlight(text: object) -> None:
    """Print `text`; if a build runs this notebook, show it in bold and blue."""
    if not is_in_ci():
        print(text)
        return
    from IPython.display import HTML, display

    shown = html.escape(str(text)).replace("\n", "<br>")
    display(HTML(f"<strong style='color: #00008B;'>{shown}</strong>"))


def read_jsonl(filename: str) -> Iterator[dict[str, Any]]:
    """Yield each line of a JSON lines file; lines that begin with `#` are comments."""
    with Path(filename).open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def get_exception_traceback() -> str:
    """Return the traceback of the exception that is being handled, as text."""
    return traceback.format_exc()


def dump_state_text(filename: str, states: Iterable[Any], mode: str = "w") -> None:
    """Write the text of each state to a file, between two lines of `=`.

    The line before a text contains the index of the state.

    Args:
        filename: the file.
        states: program states, whose `text()` is written, or other objects, whose `str` is written.
        mode: the mode in which the file is opened, `w` or `a`.
    """
    with Path(filename).open(mode, encoding="utf-8") as out:
        for number, state in enumerate(states):
            text = state.text() if callable(getattr(state, "text", None)) else str(state)
            out.write(f"{'=' * 40} {number} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def convert_json_schema_to_str(json_schema: Any) -> str:
    """Return a JSON schema as JSON text.

    Args:
        json_schema: the schema as a dict, as text, or as a pydantic class.

    Raises:
        ValueError: `json_schema` has another type.
    """
    if isinstance(json_schema, str):
        return json_schema
    if isinstance(json_schema, Mapping):
        return json.dumps(dict(json_schema))
    of_class = getattr(json_schema, "model_json_schema", None)
    if isinstance(json_schema, type) and callable(of_class):
        return json.dumps(of_class())
    raise ValueError(
        "A JSON schema is a dict, its text, or a class of pydantic, not "
        f"{type(json_schema).__name__}."
    )


def find_printable_text(text: str) -> str:
    """Return the beginning of a streamed text that is safe to show, cut at the end of a word.

    Later tokens may still change the last word, or complete its last character.
    """
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _CJK)


def is_same_type(values: Sequence[Any]) -> bool:
    """Whether all values have the same type as the first; true for fewer than two values."""
    return all(isinstance(value, type(values[0])) for value in values[1:])


def execute_once(function: Callable[P, Any]) -> Callable[P, None]:
    """Wrap `function` so that its first call runs it and later calls do nothing."""
    calls = iter([function])

    @functools.wraps(function)
    def once(*args: P.args, **keywords: P.kwargs) -> None:
        for first in calls:
            first(*args, **keywords)

    return once


@functools.lru_cache(None)
def info_once(message: str) -> None:
    """Log a message at level INFO, once per text in a process."""
    logger.info(message)


class LazyImport:
    """Stands in for a class; the class's module is imported when the class is first used."""

    def __init__(self, module_name: str, class_name: str) -> None:
        self.module_name = module_name
        self.class_name = class_name

    @functools.cached_property
    def _loaded(self) -> Any:
        return getattr(importlib.import_module(self.module_name), self.class_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._loaded(*args, **keywords)


class TypeBasedDispatcher:
    """Holds functions by type, and calls the first one whose type an object is an instance of."""

    def __init__(self, mapping: Iterable[tuple[type, Callable[[Any], Any]]]) -> None:
        self._mapping = list(mapping)

    def __iadd__(self, other: TypeBasedDispatcher) -> TypeBasedDispatcher:
        self._mapping += other._mapping
        return self

    def __call__(self, obj: Any) -> Any:
        """Call the function for the type of `obj` and return its result.

        Raises:
            ValueError: no function is registered for this type.
        """
        for kind, function in self._mapping:
            if isinstance(obj, kind):
                return function(obj)
        raise ValueError(f"No function is registered for {type(obj).__name__}.")


def resolve_obj_by_qualname(qualname: str) -> Any:
    """Return the object with a dotted name such as `package.module.name`; imports its module."""
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)
