"""An HTTP client for back ends without a vendor's package: JSON, retries, streams and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.lang.program_errors import BackendError

if TYPE_CHECKING:
    import httpx

# Requests that got these statuses are sent again: too many requests, and faults of the server. 529
# is Anthropic's status for an overloaded server.
_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class JsonHttp:
    """Sends requests to one API, on the frontend's event loop."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_retries: int,
    ) -> None:
        """Store the settings; no connection is opened yet.

        Args:
            base_url: URL to which the path of each request is appended.
            headers: headers of every request.
            timeout_s: the longest time in seconds in which the server may send nothing.
            max_retries: how often a request is sent again after an error that may be temporary.
        """
        self._base_url = base_url.rstrip("/")
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._client: httpx.AsyncClient | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a POST request and return the JSON value of its response.

        Raises:
            BackendError: the server refuses, fails, or does not answer.
        """
        async with self._response(path, body) as response:
            content = await response.aread()
        try:
            return json.loads(content)
        except ValueError:
            raise BackendError(
                f"The answer is not JSON: {content[:200]!r}", url=f"{self._base_url}{path}"
            ) from None

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send a POST request and yield the data of each server-sent event of its response.

        Closing the generator early ends the request.

        Raises:
            BackendError: the server refuses, fails, or does not answer.
        """
        async with self._response(path, body) as response:
            rest = b""
            # httpx's line iterator is not used: it also splits at characters that JSON strings may
            # hold.
            async for chunk in response.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield json.loads(data)

    @contextlib.asynccontextmanager
    async def _response(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        import httpx

        url = f"{self._base_url}{path}"
        try:
            response = await self._send(url, json.dumps(body).encode())
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise BackendError(f"{type(error).__name__}: {error}", url=url) from error

    async def _send(self, url: str, content: bytes) -> httpx.Response:
        import httpx

        client = self._client = self._client or httpx.AsyncClient(
            headers={"content-type": "application/json", **self._headers},
            timeout=httpx.Timeout(self._timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        pause_s = _FIRST_PAUSE_S
        for tries_left in range(self._max_retries, -1, -1):
            request = client.build_request("POST", url, content=content)
            try:
                response = await client.send(request, stream=True)
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ConnectTimeout):
                if not tries_left:
                    raise
                wait_s = pause_s
            else:
                if response.status_code == 200:
                    return response
                said = (await response.aread()).decode(errors="replace")
                if not tries_left or response.status_code not in _AGAIN:
                    raise BackendError(message_of(said), status=response.status_code, url=url)
                wait_s = _asked_pause_s(response.headers.get("retry-after"), pause_s)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _asked_pause_s(header: str | None, otherwise: float) -> float:
    try:
        return min(max(float(header or ""), 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return otherwise


def message_of(said: str) -> str:
    """Return the message in the body of an error response; servers use several formats."""
    try:
        error = json.loads(said)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return " ".join(said.split())[:300]
