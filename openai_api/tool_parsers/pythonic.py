"""Parser of tool calls in Python's syntax, for Llama 4, ToolACE and others: `[f(a=1), g(b="x")]`.

The calls are only parsed, never executed.
"""

from __future__ import annotations

import ast
import math
import re

import orjson

from openai_api.call_ids import IdForm
from openai_api.json_scan import MAX_DEPTH
from openai_api.parser_signs import Signs
from openai_api.tool_parsers.call_writer import CallWriter
from openai_api.tool_parsers.tool_parser import CallForm, Functions, ToolPart

# The most characters of one call. Python's parser takes a few milliseconds for that.
MAX_CALL = 64 * 1024
# The most nested brackets of a call, far below the limit of Python's parser.
_MAX_BRACKETS = 64

_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# Characters after a backslash that make an escape. Before others Python keeps the backslash.
_ESCAPES = frozenset("\\'\"abfnrtvxuUN\n0123")
_DULL = re.compile(r"""[^"'()\[\]{}\\]+""")
_PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_NAME = re.compile(r"\s*[\w.\-]*\s*")
_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Reads calls in an output that begins with a bracket; a call is passed on when complete."""

    markers = ("<|python_start|>", "<|python_end|>")
    signs = Signs(template=("[func_name1(params_name1=params_value1",))
    call_form: CallForm | None = None
    id_form: IdForm | None = None

    def __init__(self, functions: Functions, *, max_calls: int | None) -> None:
        """Accept at most `max_calls` calls, of the given functions only."""
        self._writer = CallWriter(functions, max_calls)
        self._start, self._end = self.markers
        # Text that was read and may belong to a call.
        self._read: list[str] = []
        self._num_read = 0
        self._held = ""
        self._call: list[str] = []
        self._open: list[str] = []
        self._quote = ""
        self._state = self._at_start

    def feed(self, text: str) -> list[ToolPart]:
        """Add more output; return texts and parts of calls, in order."""
        if self._held:
            text, self._held = self._held + text, ""
        place = 0
        while place < len(text):
            place = self._state(text, place)
        return self._writer.take()

    def finish(self) -> list[ToolPart]:
        """End the output; return the text that was held back."""
        rest = "".join([*self._read, self._held])
        if not (self._writer.has_called and rest.isspace()):
            self._writer.text(rest)
        self._read, self._held = [], ""
        return self._writer.take()

    # ---- states: each one reads from index `place`, and returns where it ended ----

    def _in_text(self, text: str, place: int) -> int:
        self._writer.text(text[place:])
        return len(text)

    def _at_start(self, text: str, place: int) -> int:
        place = self._skip_space(text, place)
        if place == len(text):
            return place
        if text.startswith(self._start, place):
            self._keep(self._start)
            return place + len(self._start)
        if self._start.startswith(text[place:]):
            self._held = text[place:]
            return len(text)
        if text[place] == "[":
            self._keep("[")
            self._begin_call()
            return place + 1
        self._give_back()
        return place

    def _begin_call(self) -> None:
        self._call, self._open, self._quote = [], [], ""
        self._state = self._in_call

    def _in_call(self, text: str, place: int) -> int:
        """Read plain characters of a call, a bracket, or a part of a string; return its end."""
        before, place = place, self._step(text, place)
        self._keep(text[before:place])
        self._call.append(text[before:place])
        if self._num_read > MAX_CALL or len(self._open) > _MAX_BRACKETS:
            self._give_back()
        elif text[place - 1] == ")" and not self._open and not self._quote:
            self._close()
        elif not self._open and not _may_be_name(self._call):
            self._give_back()
        return place

    def _step(self, text: str, place: int) -> int:
        char = text[place]
        if self._quote:
            if char == "\\":
                # Note the backslash: the next character is skipped, even if it comes with the next
                # piece.
                self._quote += "\\"
                return place + 1
            if self._quote.endswith("\\"):
                self._quote = self._quote[:1]
                return place + 1
            if char == self._quote:
                self._quote = ""
                return place + 1
            plain = _PLAIN[self._quote].match(text, place)
            assert plain is not None
            return plain.end()
        dull = _DULL.match(text, place)
        if dull is not None:
            return dull.end()
        if char in "\"'":
            self._quote = char
        elif char in _CLOSERS:
            self._open.append(_CLOSERS[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
        return place + 1

    def _close(self) -> None:
        call = _read_call("".join(self._call))
        if call is None or not self._writer.call(*call):
            self._give_back()
            return
        self._read, self._num_read = [], 0
        self._state = self._behind_call

    def _behind_call(self, text: str, place: int) -> int:
        place = self._skip_space(text, place)
        if place == len(text):
            return place
        if text[place] == ",":
            self._keep(",")
            self._begin_call()
            return place + 1
        if text[place] == "]":
            self._read, self._num_read = [], 0
            self._state = self._behind_list
            return place + 1
        self._give_back()
        return place

    def _behind_list(self, text: str, place: int) -> int:
        place = self._skip_space(text, place)
        if place == len(text):
            return place
        if text.startswith(self._end, place):
            self._read, self._num_read = [], 0
            return place + len(self._end)
        if self._end.startswith(text[place:]):
            self._held = text[place:]
            return len(text)
        self._give_back()
        return place

    def _skip_space(self, text: str, place: int) -> int:
        space = _SPACE.match(text, place)
        assert space is not None
        self._keep(space[0])
        return space.end()

    def _keep(self, text: str) -> None:
        if text:
            self._read.append(text)
            self._num_read += len(text)

    def _give_back(self) -> None:
        """Pass the read text on as text, because it is not a call."""
        self._writer.text("".join(self._read))
        self._read, self._num_read, self._state = [], 0, self._in_text


def _may_be_name(pieces: list[str]) -> bool:
    """Whether the text so far may be a function's name, perhaps with whitespace around it."""
    return _NAME.fullmatch(pieces[-1]) is not None


def _known_escape(found: re.Match[str]) -> str:
    return found[0] if found[1] in _ESCAPES else "\\" + found[0]


def _read_call(source: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of one call; `None` if `source` is not a call."""
    escaped = _ESCAPE.sub(_known_escape, source)
    try:
        call = ast.parse(escaped.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {each.arg: _value(each.value, MAX_DEPTH) for each in call.keywords}
        if None in arguments:
            return None
        return _dotted(call.func), orjson.dumps(arguments).decode()
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        # (orjson raises TypeError for a number of more than 64 bits.)
        return None


def _dotted(node: ast.expr) -> str:
    """Return the name of the called function, with its dots.

    Raises:
        ValueError: the called expression is not a name.
    """
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("called by another expression")
    return ".".join([node.id, *reversed(names)])


def _value(node: ast.expr, depth: int) -> object:
    """Return the value of a literal.

    Raises:
        ValueError: the node is not a literal, or nests too deep.
    """
    if not depth:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=float() as number) if not math.isfinite(number):
            raise ValueError("not a JSON number")
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(each, depth - 1) for each in node.elts]
        case ast.Dict():
            keys = [_value(key, depth - 1) if key is not None else None for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("keys of objects are strings")
            values = [_value(each, depth - 1) for each in node.values]
            return dict(zip(keys, values, strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError("not a literal")
