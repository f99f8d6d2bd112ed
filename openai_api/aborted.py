"""The end of an answer that was aborted: an error, for only the native wire has a word for it."""

from __future__ import annotations

from runtime.errors import HeadraceError
from runtime.ipc.messages import FinishReason


class Aborted(HeadraceError):
    """Somebody aborted the request; to send it again is for its client to decide."""

    status_code = 400
    code = "request_aborted"


def ended(reason: FinishReason | None) -> FinishReason:
    """Why an answer ended that is complete.

    Raises:
        Aborted: it is not.
    """
    if reason is None or reason.type == "abort":
        raise Aborted((reason and reason.message) or "The request was aborted.")
    return reason
