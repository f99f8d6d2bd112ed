"""Turns an aborted answer into an error: only the native wire has a finish reason for it."""

from __future__ import annotations

from runtime.errors import HeadraceError
from runtime.ipc.messages import FinishReason


class Aborted(HeadraceError):
    """The request was aborted; its client decides whether to send it again."""

    status_code = 400
    code = "request_aborted"


def ended(reason: FinishReason | None) -> FinishReason:
    """Return why a complete answer ended.

    Raises:
        Aborted: the answer is not complete.
    """
    if reason is None or reason.type == "abort":
        raise Aborted((reason and reason.message) or "The request was aborted.")
    return reason
