"""Renders one compiled chat template within limits of time and text."""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError

from openai_api.template_sandbox import (
    Budget,
    TemplateTooLong,
    TemplateTooSlow,
    compile_bounded,
    make_environment,
    render_bounded,
)
from runtime.errors import InvalidRequest, StartupError, TooLong

RENDER_TIMEOUT_S = 5.0


class RenderTimeout(InvalidRequest):
    """Rendering a chat template took too long."""


# The error of the request for each exception of the sandbox.
_KINDS: tuple[tuple[type[Exception], type[InvalidRequest]], ...] = (
    (TemplateTooLong, TooLong),
    (TemplateTooSlow, RenderTimeout),
)
_OTHER = InvalidRequest


def parse_template(source: str, name: str) -> nodes.Template:
    """Parse a template's source to a syntax tree, without evaluating anything.

    Raises:
        StartupError: the source is not a Jinja template.
    """
    try:
        return make_environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(does_not_parse(name, error)) from None
    except RecursionError:
        raise StartupError(f"The chat template ({name}) nests too deep.") from None


def does_not_parse(name: str, error: jinja2.TemplateSyntaxError) -> str:
    """Return a one-line message that says where a template is wrong."""
    return f"The chat template ({name}) does not parse, line {error.lineno}: {error.message}"


class CompiledTemplate:
    """A template that is rendered in this process.

    Attributes:
        variables: names of the variables that the template reads.
    """

    def __init__(self, source: str, name: str) -> None:
        """Compile the template, which evaluates its constant expressions.

        Raises:
            StartupError: the source is not a Jinja template.
        """
        environment = make_environment()
        tree = parse_template(source, name)
        try:
            self.variables = meta.find_undeclared_variables(tree)
            self._template = compile_bounded(environment, tree)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(does_not_parse(name, error)) from None
        except (RecursionError, SyntaxError, MemoryError):
            raise StartupError(f"The chat template ({name}) nests too deep.") from None

    def render(
        self, values: dict[str, Any], max_chars: int, timeout_s: float = RENDER_TIMEOUT_S
    ) -> str | None:
        """Render the prompt.

        Args:
            values: the template's variables.
            max_chars: the most characters of the prompt.
            timeout_s: the most seconds of rendering.

        Returns:
            The prompt. `None` if the template fails on the type of a value, an error without a
            message for the user.

        Raises:
            InvalidRequest: the template refuses these values, or rendering exceeds a limit.
        """
        try:
            return render_bounded(self._template, values, Budget(max_chars, timeout_s))
        except (jinja2.UndefinedError, SecurityError):
            return None
        except jinja2.TemplateError as error:
            message = error.message or "it refuses these messages"
            kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), _OTHER)
            raise kind(f"Chat template error: {message}", param="messages") from None
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            return None
        except MemoryError:
            raise InvalidRequest(
                "Chat template error: it needs too much memory for these messages",
                param="messages",
            ) from None
