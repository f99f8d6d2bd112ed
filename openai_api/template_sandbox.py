"""Jinja with the settings of `transformers`, and with limits on time and on output.

A template comes with a model, so it is untrusted code, and its cost depends on the request's
values. So every loop, call and string operation checks the limits of the rendering.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

BUDGET = "__budget__"
_BOUNDED = "__bounded__"
_JOINED = "__joined__"

MAX_EXPONENT = 1000
MAX_PADDING = 10_000
MAX_PARTS = 1_000_000
_NUMBER = re.compile(r"\d+")
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateTooCostly(jinja2.TemplateError):
    """A rendering exceeded a limit."""


class TemplateTooLong(TemplateTooCostly):
    """A rendering would have made more text than allowed."""


class TemplateTooSlow(TemplateTooCostly):
    """A rendering took more time than allowed."""


class Budget:
    """The limits of one rendering: characters of output, and seconds."""

    def __init__(self, max_chars: int, timeout_s: float) -> None:
        """Set the limits; the time starts now."""
        self.max_chars = max_chars
        self._deadline = time.monotonic() + timeout_s

    def check_time(self) -> None:
        """Raise `TemplateTooSlow` once the time is up."""
        if time.monotonic() > self._deadline:
            raise TemplateTooSlow("the chat template took too long to render")

    def check_size(self, num_chars: int) -> None:
        """Raise `TemplateTooLong` if a text or a list is longer than the output may be."""
        if num_chars > self.max_chars:
            raise TemplateTooLong(
                "the text it renders is longer than the model's context length allows"
            )

    def check_value(self, value: Any, indent: int = 0) -> None:
        """Raise `TemplateTooLong` if a value's JSON would be longer than the output may be.

        A value may have the same part many times and nest deep, so its JSON may be much longer than
        the value in memory.

        Args:
            value: the value.
            indent: characters of indentation for each level.
        """
        num_chars = 0
        stack = [(value, 1)]
        while stack:
            part, level = stack.pop()
            if isinstance(part, str):
                num_chars += len(part)
            elif isinstance(part, (dict, list, tuple)):
                # For each entry: its separator, its line break and, in a dict, the key's quotes.
                num_chars += (indent * level + 1 + 2 * isinstance(part, dict)) * len(part)
            self.check_size(num_chars)
            if isinstance(part, dict):
                stack += [(each, level + 1) for pair in part.items() for each in pair]
            elif isinstance(part, (list, tuple)):
                stack += [(each, level + 1) for each in part]


def _budget_of(context: Context) -> Budget:
    budget = context.get(BUDGET)
    assert isinstance(budget, Budget)
    return budget


@pass_context
def _bounded(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget_of(context)
    for item in iterable:
        budget.check_time()
        yield item


def _check_format(budget: Budget, form: str, values: Any) -> None:
    if "*" in form or any(len(digits) > 5 for digits in _NUMBER.findall(form)):
        raise TemplateTooCostly("the chat template formats with too large a width")
    budget.check_size(sum(map(int, _NUMBER.findall(form))))
    budget.check_value([values] * form.count("%"))


def _check_method(budget: Budget, text: str, method: str, args: tuple[Any, ...]) -> None:
    if method == "replace":
        _check_replacement(budget, text, *args[:3])
    elif method in ("split", "rsplit", "splitlines") and len(text) > MAX_PARTS:
        is_named = bool(args) and isinstance(args[0], str) and bool(args[0])
        separators = args[:1] if is_named else (" ", "\n", "\t", "\r")
        if sum(map(text.count, separators)) > MAX_PARTS:
            raise TemplateTooCostly("the chat template cuts a text into too many parts")


def _check_replacement(
    budget: Budget, text: str, old: object = "", new: object = "", count: object = None
) -> None:
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        if isinstance(count, int) and count >= 0:
            found = min(found, count)
        budget.check_size(len(text) + found * (len(new) - len(old)))


@pass_context
def _replace(
    context: Context, value: object, old: object, new: object, count: int | None = None
) -> str:
    text, old, new = str(value), str(old), str(new)
    _check_replacement(_budget_of(context), text, old, new, count)
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _joined(context: Context, *values: object) -> str:
    text = "".join(map(str, values))
    _budget_of(context).check_size(len(text))
    return text


class _Bounds(NodeTransformer):
    """Rewrites a template's loops and `~` operators so that they check the limits."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._call(_BOUNDED, [cast("nodes.Expr", node.iter)], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call(_JOINED, node.nodes, node.lineno)

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.Name(name, "load"), args, [], None, None)
        call.set_lineno(line)
        call.set_environment(self._environment)
        return call


class _GenerationBlock(Extension):
    """The block `{% generation %}`, which marks text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_render"), [], [], body)
        block.set_lineno(line)
        return block

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    # As in `transformers`, private attributes are refused, because they reach Python's internals.
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError("namespace attributes must not begin with an underscore")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    budget.check_size(len(sequence) * max(times, 0))
        elif operator == "**" and isinstance(right, (int, float)) and abs(right) > MAX_EXPONENT:
            raise TemplateTooCostly("the chat template computes too large a power")
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            budget.check_size(len(result))
        return result

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.check_time()
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str) and getattr(called, "__name__", "") in _PADDING_METHODS:
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    budget.check_size(value * (owner.count("\t") + 1))
        elif isinstance(owner, str):
            _check_method(budget, owner, called.__name__, args)
        result = super().call(context, called, *args, **kwargs)
        if isinstance(result, str):
            budget.check_size(len(result))
        return result


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else int(indent or 0)
    _budget_of(context).check_value(value, max(width, 0))
    # Jinja's own `tojson` escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _center(value: str, width: int = 80) -> str:
    return str(value).center(min(width, MAX_PADDING))


def make_environment() -> jinja2.Environment:
    """Return a Jinja environment with the settings and functions that chat templates rely on."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["center"] = _center
    environment.filters["replace"] = _replace
    environment.globals.pop("lipsum")
    environment.globals.update(
        {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _TemplateNamespace,
            _BOUNDED: _bounded,
            _JOINED: _joined,
        }
    )
    return environment


def compile_bounded(environment: jinja2.Environment, tree: nodes.Template) -> jinja2.Template:
    """Compile a parsed template whose loops and joins check the limits of the rendering."""
    bounded = _Bounds(environment).visit(tree)
    code = environment.compile(bounded)
    # A plain dictionary, because each rendering copies it, and copying Jinja's ChainMap is slow.
    return environment.template_class.from_code(environment, code, dict(environment.globals))


def render_bounded(template: jinja2.Template, values: dict[str, Any], budget: Budget) -> str:
    """Render a template; stop as soon as a limit is exceeded.

    Raises:
        TemplateTooCostly: rendering needs too much time or text.
        jinja2.TemplateError: the template itself raised an error.
    """
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate({**values, BUDGET: budget}):
        num_chars += len(piece)
        budget.check_size(num_chars)
        budget.check_time()
        pieces.append(piece)
    return "".join(pieces)
