"""A process that renders chat templates that may be hostile, each rendering in its own fork."""

from __future__ import annotations

from typing import Any

import msgspec

from openai_api.template_render import RENDER_TIMEOUT_S, CompiledTemplate
from runtime.errors import HeadraceError, InvalidRequest, Overloaded, TooLong
from runtime.ipc.fork_server import ForkServer, serve
from runtime.ipc.limited_forks import ForkEnd, ForkLimits

# A rendering gets more wall time than processor time, because the machine may be busy.
LIMITS = ForkLimits(timeout_s=20.0, cpu_s=RENDER_TIMEOUT_S, memory_bytes=2**29)
MAX_PARALLEL = 2


class Job(msgspec.Struct):
    """A template's source, and the values to render; without `values` it is only compiled."""

    source: str
    name: str
    values: dict[str, Any] | None = None
    max_chars: int = 0


class Rendered(msgspec.Struct, omit_defaults=True):
    """The result of a job.

    Attributes:
        text: the prompt; `None` if the template failed on the type of a value.
        error: why there is no prompt.
        error_kind: `refused`, `too_long`, `busy`, or `startup` if the source is not a template.
        variables: names of the variables that the template reads.
        compiled: the job, if its template was only compiled and compiling succeeded; else `None`.
    """

    text: str | None = None
    error: str = ""
    error_kind: str = ""
    variables: list[str] = []
    compiled: Job | None = None


_KINDS: dict[str, type[HeadraceError]] = {
    "refused": InvalidRequest,
    "too_long": TooLong,
    "busy": Overloaded,
}
_encode = msgspec.msgpack.Encoder().encode
_job = msgspec.msgpack.Decoder(Job)
_rendered = msgspec.msgpack.Decoder(Rendered)


# ---- in the front process ----


class TemplateProcess:
    """The front process's handle of the rendering process; several threads may use it.

    The first job starts the process. If the process has died, the next job starts it again.
    """

    def __init__(self) -> None:
        """Prepare without starting the process."""
        self._server = ForkServer("openai_api.template_process", "rendering chat templates")

    @property
    def pid(self) -> int | None:
        """The process id; `None` before the first start."""
        return self._server.pid

    def ask(self, job: Job) -> Rendered:
        """Run one job and wait for its result.

        Raises:
            EngineDead: the process died, and so did its replacement.
            InvalidRequest: the values cannot be encoded.
            Overloaded: the machine is too busy.
        """
        try:
            payload = _encode(job)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"The chat template cannot be given these messages: {error}.", param="messages"
            ) from None
        return _rendered.decode(self._server.ask(payload))


def raise_error(rendered: Rendered) -> None:
    """Raise the error of a failed rendering; return if it succeeded."""
    if rendered.error_kind:
        raise _KINDS[rendered.error_kind](rendered.error, param="messages")


# ---- in the rendering process ----


class _Renderer:
    """The work of the process. A fork inherits the templates that were compiled before."""

    def __init__(self) -> None:
        self._templates: dict[str, CompiledTemplate] = {}

    def work(self, payload: bytes) -> bytes:
        """Decode and run one job, and return its encoded result; called in a fork."""
        return _encode(self._render(_job.decode(payload)))

    def _render(self, job: Job) -> Rendered:
        try:
            template = self._templates.get(job.source) or CompiledTemplate(job.source, job.name)
            if job.values is None:
                return Rendered(variables=sorted(template.variables), compiled=job)
            return Rendered(template.render(job.values, job.max_chars))
        except TooLong as error:
            return Rendered(error=error.message, error_kind="too_long")
        except InvalidRequest as error:
            return Rendered(error=error.message, error_kind="refused")
        except HeadraceError as error:
            return Rendered(error=error.message, error_kind="startup")

    def answer(self, end: ForkEnd) -> bytes:
        """Return the reply to the front process after a fork has ended. It runs in the parent."""
        if end.got_no_processor:
            error = "The machine was too busy to render the chat template; please try again."
            return _encode(Rendered(error=error, error_kind="busy"))
        if not end.answer:
            error = (
                f"Chat template error: it needs more than {LIMITS.cpu_s:g} s or "
                f"{LIMITS.memory_bytes >> 20} MiB for these messages"
            )
            return _encode(Rendered(error=error, error_kind="refused"))
        if (job := _rendered.decode(end.answer).compiled) is not None:
            # The fork has shown that compiling stays within the limits. So the parent compiles the
            # template too, and later forks inherit it.
            self._templates[job.source] = CompiledTemplate(job.source, job.name)
        return end.answer


def main() -> None:
    """Run jobs until the front process has ended."""
    renderer = _Renderer()
    serve(renderer.work, renderer.answer, LIMITS, MAX_PARALLEL)


if __name__ == "__main__":
    main()
