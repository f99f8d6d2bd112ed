"""`/last_errors`: lists the requests that were refused or failed lately, with the reasons."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import TypedDict

from starlette.responses import Response

from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import json_response

MAX_KEPT = 100


class LastError(TypedDict):
    """One response with a status of 400 or above."""

    time: str
    status: int
    method: str
    path: str
    reason: str
    request_id: str


class LastErrorsAnswer(TypedDict):
    """The last errors, the latest first."""

    errors: list[LastError]


class LastErrors:
    """Keeps the last `MAX_KEPT` errors, the latest first."""

    def __init__(self) -> None:
        self._kept: deque[LastError] = deque(maxlen=MAX_KEPT)

    def note(self, status: int, method: str, path: str, reason: str, request_id: str) -> None:
        """Add an error; the caller has cut `reason` and `path` and made them printable."""
        self._kept.appendleft(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "status": status,
                "method": method,
                "path": path,
                "reason": reason.strip(),
                "request_id": request_id,
            }
        )

    def newest_first(self) -> list[LastError]:
        """Return all kept errors, the latest first."""
        return list(self._kept)


def create_errors_router(last_errors: LastErrors) -> AccessRouter:
    """Create the router of `/last_errors`, for the operator only, because it shows all clients.

    The method is POST, because browsers must not GET admin routes; see `server.entry.origins`.
    """
    router = AccessRouter(Access.ADMIN, tags=["native"])

    @router.post("/last_errors", openapi_extra=operation(ok=json_of(LastErrorsAnswer)))
    async def read_last_errors() -> Response:
        """The last 100 responses with status 400 or above, with their reasons."""
        return json_response({"errors": last_errors.newest_first()})

    return router
