"""The expressions that a program appends to its state; `headrace.lang.api` builds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from headrace.lang.choices import ChoicesSamplingMethod
from headrace.lang.dtypes import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from headrace.lang.program_errors import Source
from headrace.lang.sampling import SglSamplingParams

if TYPE_CHECKING:
    from headrace.lang.function import SglFunction

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglConstantText",
    "SglExpr",
    "SglExprList",
    "SglFunction",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSamplingParams",
    "SglSelect",
    "SglSeparateReasoning",
    "SglVarScopeBegin",
    "SglVarScopeEnd",
    "SglVideo",
]

T = TypeVar("T")

_OURS = "headrace.lang."


def caller() -> Source | None:
    """Return the line of the user's code that called the frontend, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OURS):
            return Source(frame.f_code.co_filename, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def refuse(value: object) -> NoReturn:
    """Raise the error for a value that cannot be part of an expression.

    Raises:
        TypeError: always; the message says which values are allowed.
    """
    hint = ""
    if isinstance(value, (int, float)):
        hint = "; str() makes it text"
    elif hasattr(value, "stream_executor"):
        hint = "; append its text() or one of its variables"
    raise TypeError(
        f"A program takes text and expressions (gen, select, user, ...), not "
        f"{type(value).__name__} {value if isinstance(value, (int, float)) else ''}".rstrip()
        + hint
        + "."
    )


class SglExpr:
    """An expression that can be appended to a state; `+` joins it with texts and expressions."""

    __slots__ = ()

    def parts(self) -> Iterator[SglExpr]:
        """Yield the single expressions of which this expression consists, in order."""
        yield self

    def __add__(self, other: SglExpr | str) -> SglExprList:
        return SglExprList([*self.parts(), *as_expression(other).parts()])

    def __radd__(self, other: SglExpr | str) -> SglExprList:
        return SglExprList([*as_expression(other).parts(), *self.parts()])


class SglExprList(SglExpr):
    """A sequence of expressions."""

    __slots__ = ("expr_list",)

    def __init__(self, expr_list: Sequence[SglExpr]) -> None:
        """Store the expressions in order."""
        self.expr_list = list(expr_list)

    def parts(self) -> Iterator[SglExpr]:
        for expression in self.expr_list:
            yield from expression.parts()

    def __repr__(self) -> str:
        return f"ExprList({self.expr_list})"


class SglConstantText(SglExpr):
    """An expression that appends constant text."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        """Store the text."""
        self.value = value

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


class SglGen(SglExpr, Generic[T]):
    """An expression that generates text.

    If it is used as a key of a state (`state[answer]`), it returns the value with the generation's
    type.

    Attributes:
        name: name of the variable, or None.
        sampling_params: the sampling parameters that this generation sets.
        parse: function that converts the text to the value.
        source: the line of the user's code that created the generation.
    """

    __slots__ = ("name", "parse", "sampling_params", "source")

    def __init__(
        self,
        name: str | None,
        sampling_params: SglSamplingParams,
        parse: Callable[[str], T] | None = None,
    ) -> None:
        """Store the arguments of `gen`."""
        self.name = name
        self.sampling_params = sampling_params
        self.parse = parse
        self.source = caller()

    def __repr__(self) -> str:
        return f"Gen({self.name!r})"


class SglSelect(SglExpr):
    """An expression that appends the most likely of several texts."""

    __slots__ = ("choices", "choices_method", "name", "source", "temperature")

    def __init__(
        self,
        name: str | None,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> None:
        """Store the arguments of `select`."""
        self.name = name
        self.choices = list(choices)
        self.temperature = temperature
        self.choices_method = choices_method
        self.source = caller()

    def __repr__(self) -> str:
        return f"Select({self.name!r}, choices={self.choices}, {self.choices_method!r})"


class SglRoleBegin(SglExpr):
    """An expression that begins a turn of a role."""

    __slots__ = ("role",)

    def __init__(self, role: str) -> None:
        """Store the role."""
        self.role = role

    def __repr__(self) -> str:
        return f"RoleBegin({self.role})"


class SglRoleEnd(SglExpr):
    """An expression that ends the turn of a role."""

    __slots__ = ("role",)

    def __init__(self, role: str) -> None:
        """Store the role."""
        self.role = role

    def __repr__(self) -> str:
        return f"RoleEnd({self.role})"


class SglVarScopeBegin(SglExpr):
    """Marks where the text begins that becomes the value of a variable."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Store the name of the variable."""
        self.name = name

    def __repr__(self) -> str:
        return f"VarScopeBegin({self.name})"


class SglVarScopeEnd(SglExpr):
    """An expression that ends the text of a variable that `SglVarScopeBegin` began."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Store the name of the variable."""
        self.name = name

    def __repr__(self) -> str:
        return f"VarScopeEnd({self.name})"


class SglImage(SglExpr):
    """An expression that appends an image.

    The image is a path, a URL, a data URL, base64, bytes, or an image object.
    """

    __slots__ = ("path",)

    def __init__(self, path: Any) -> None:
        """Store the image; it is read when the expression is executed."""
        self.path = path

    def __repr__(self) -> str:
        return "Image()"


class SglVideo(SglExpr):
    """An expression that appends frames of a video as images."""

    __slots__ = ("num_frames", "path")

    def __init__(self, path: Any, num_frames: int) -> None:
        """Store the video; it is read when the expression is executed."""
        self.path = path
        self.num_frames = num_frames

    def __repr__(self) -> str:
        return f"Video({self.num_frames})"


class SglSeparateReasoning(SglExpr):
    """An expression that separates the reasoning from the answer of a generation.

    Attributes:
        model_type: name of the reasoning parser, such as `qwen3`.
        name: name of the generation's variable.
    """

    __slots__ = ("model_type", "name")

    def __init__(self, model_type: str, expr: SglExpr) -> None:
        """Store the parser's name, and find the name of the generation in `expr`.

        Raises:
            ValueError: `expr` contains no generation with a name.
        """
        named = [part for part in expr.parts() if isinstance(part, (SglGen, SglSelect))]
        names = [part.name for part in named if part.name]
        if not names:
            raise ValueError("separate_reasoning needs a generation with a name: gen('answer').")
        self.name = names[-1]
        self.model_type = model_type

    @property
    def reasoning_name(self) -> str:
        """The name of the variable that gets the reasoning."""
        return f"{self.name}_reasoning_content"

    def __repr__(self) -> str:
        return f"SeparateReasoning(model_type={self.model_type}, name={self.name})"


def as_expression(value: SglExpr | str) -> SglExpr:
    """Return `value` as an expression; text becomes an `SglConstantText`.

    Raises:
        TypeError: `value` is neither text nor an expression.
    """
    if isinstance(value, str):
        return SglConstantText(value)
    if isinstance(value, SglExpr):
        return value
    refuse(value)


def names_set(expression: SglExpr) -> list[str]:
    """Return the names of the variables that are set when `expression` is executed."""
    if isinstance(expression, (SglGen, SglSelect, SglVarScopeEnd)):
        return [expression.name] if expression.name else []
    if isinstance(expression, SglSeparateReasoning):
        return [expression.name, expression.reasoning_name]
    return []


def __getattr__(name: str) -> Any:
    # `SglFunction` is imported only when it is used, because `function` imports this module.
    if name == "SglFunction":
        from headrace.lang.function import SglFunction

        return SglFunction
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
