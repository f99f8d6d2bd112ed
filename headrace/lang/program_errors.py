"""Errors of programs; their messages lead the program's author to the failing line.

ProgramError            a generation failed, or its missing variable is read
`-- ProgramCancelled    the program was cancelled, or the reader of its stream left early
    `-- ProgramTimeout  it was not done within the `timeout` of `run`
BackendError            a server or an API answered with an error
"""

from __future__ import annotations

from typing import NamedTuple

_TAIL_CHARS = 200


class Source(NamedTuple):
    """Where in the user's code an expression was built."""

    file: str
    line: int


class BackendError(RuntimeError):
    """A back end could not answer.

    Attributes:
        message: the server's own message.
        status: the HTTP status, or None without an answer.
        url: address of the request.
    """

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        """Compose the message."""
        told = " ".join(part for part in (url, f"answered {status}" if status else "") if part)
        super().__init__(f"{told}: {message}" if told else message)
        self.message = message
        self.status = status
        self.url = url


class ProgramError(KeyError, RuntimeError):
    """A program could not do a step; `__cause__` is the back end's own error.

    It is also a `KeyError`, so `except KeyError` around the read of a variable still works.

    Attributes:
        function: name of the program, if it has one.
        variable: name of the variable that the generation would have set, if any.
        source: where the generation was built.
        prompt_tail: the end of the text that the generation would have continued.
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
        # A plain KeyError would show the message in quotes.
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
    """The program exceeded its time and was ended."""


def is_failed_generation(error: BaseException | None) -> bool:
    """Whether a back end's failure or a cancellation caused `error`, not a bug in the program."""
    return isinstance(error, ProgramError) and (
        error.__cause__ is not None or isinstance(error, ProgramCancelled)
    )
