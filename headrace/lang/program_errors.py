"""The errors of programs; their messages name the line of the program that failed.

ProgramError            a generation failed, or its missing variable is read
`-- ProgramCancelled    the program was cancelled, or the reader of its stream left early
    `-- ProgramTimeout  it was not done within the `timeout` of `run`
BackendError            a server or an API answered with an error
"""

from __future__ import annotations

from typing import NamedTuple

_TAIL_CHARS = 200


class Source(NamedTuple):
    """The line of the user's code that created an expression."""

    file: str
    line: int


class BackendError(RuntimeError):
    """A server or an API answered a request with an error, or not at all.

    Attributes:
        message: the server's own message.
        status: the HTTP status, or None if there was no response.
        url: the URL of the request.
    """

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        """Store the facts and make one message of them."""
        told = " ".join(part for part in (url, f"answered {status}" if status else "") if part)
        super().__init__(f"{told}: {message}" if told else message)
        self.message = message
        self.status = status
        self.url = url


class ProgramError(KeyError, RuntimeError):
    """A step of a program failed; `__cause__` is the back end's own error.

    It is also a `KeyError`, so `except KeyError` around the read of a variable still works.

    Attributes:
        function: name of the program, if it has one.
        variable: name of the variable that the failed generation should have set, if any.
        source: the line of the user's code that created the generation.
        prompt_tail: the end of the text that the generation should have continued.
    """

    def __init__(
        self,
        message: str,
        *,
        function: str | None = None,
        variable: str | None = None,
        source: Source | None = None,
        prompt_tail: str = "",
    ) -> None:
        """Compose one message from the known facts."""
        super().__init__(message)
        self.message = message
        self.function = function
        self.variable = variable
        self.source = source
        self.prompt_tail = prompt_tail[-_TAIL_CHARS:]

    def __str__(self) -> str:
        # `KeyError.__str__` would show the message in quotes, so the text is made here.
        parts = [self.message]
        if self.function:
            parts.append(f"in the program {self.function!r}")
        if self.source:
            parts.append(f"at {self.source.file}:{self.source.line}")
        if self.prompt_tail:
            parts.append(f"after {self.prompt_tail!r}")
        return ", ".join(parts)


class ProgramCancelled(ProgramError):
    """The program was cancelled before it was done."""


class ProgramTimeout(ProgramCancelled):
    """The program was cancelled, because it took longer than the `timeout` of `run`."""


def is_failed_generation(error: BaseException | None) -> bool:
    """Whether `error` comes from a failed generation or a cancellation, not from the program."""
    return isinstance(error, ProgramError) and (
        error.__cause__ is not None or isinstance(error, ProgramCancelled)
    )
