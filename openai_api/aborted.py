"""Turns an aborted answer into an error, because OpenAI's API has no finish reason for it."""

from __future__ import annotations

from runtime.errors import HeadraceError
from runtime.ipc.messages import FinishReason


class Aborted(HeadraceError):
    """The request was aborted. The client may send it again."""

    status_code = 400
    code = "request_aborted"


def ended(reason: FinishReason | None) -> FinishReason:
    """Return the finish reason of an answer that was read to its end.

    Raises:
        Aborted: the request was aborted, or its output ended without a reason.
    """
    if reason is None or reason.type == "abort":
        raise Aborted((reason and reason.message) or "The request was aborted.")
    return reason
