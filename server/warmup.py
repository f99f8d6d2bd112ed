"""The warm-up: the server sends its first requests to itself, through its own socket."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

import orjson

from runtime.config.options import HttpArgs
from runtime.errors import StartupError

WARMUP_TIMEOUT_S = 600.0
_PROMPT = "The capital city of France is"
_PROMPT_IDS = [0, 1, 2, 3]
_NUM_TOKENS = 8
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class _Address(NamedTuple):
    host: str
    port: int
    tls: ssl.SSLContext | None


def _trusting() -> ssl.SSLContext:
    # The certificate is not verified. It names the server as clients know it, and this connection
    # goes to this process itself.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def warm_up(
    http: HttpArgs, port: int, dp_size: int, *, has_tokenizer: bool = True, path: str = "/generate"
) -> float | None:
    """Send a first request to every replica, for a few tokens or for a vector.

    Returns:
        Tokens per second of a single answer from the last replica; None if the answer was too short
        to tell.

    Raises:
        StartupError: the server did not answer its own request.
    """
    host = _WILDCARD_HOSTS.get(http.host, http.host)
    address = _Address(host, port, _trusting() if http.ssl_certfile is not None else None)
    text, ids = ("input", "input") if path == "/pooling" else ("text", "input_ids")
    body = {
        **({text: _PROMPT} if has_tokenizer else {ids: _PROMPT_IDS}),
        "sampling_params": {"temperature": 0, "max_new_tokens": _NUM_TOKENS},
        "log_metrics": False,
    }
    if path == "/generate":
        body["stream"] = True
    speed = None
    # The API key is enough, also for servers with only an admin key: these routes then need none.
    key = http.api_key
    try:
        async with asyncio.timeout(WARMUP_TIMEOUT_S):
            await _request(address, "GET", "/model_info", key, b"")
            for rank in range(dp_size):
                payload = orjson.dumps({**body, "data_parallel_rank": rank})
                speed = await _request(address, "POST", path, key, payload)
    except TimeoutError:
        raise StartupError(f"The warm-up got no answer in {WARMUP_TIMEOUT_S:.0f} s.") from None
    except OSError as error:
        raise StartupError(f"The warm-up cannot reach {host}:{port}: {error}.") from None
    return speed


async def _request(
    address: _Address, method: str, path: str, key: str | None, body: bytes
) -> float | None:
    """Send a request; return the tokens per second of its answer, None if not measurable.

    Raises:
        StartupError: the answer is an error.
    """
    # No HTTP library is used: it would cost the front process 15 MB for a few requests.
    head = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        answer, speed = await read_answer(reader)
    finally:
        writer.close()
    status_line = answer.partition(b"\r\n")[0].split(b" ")
    # A request that fails after the status line has an error as the last event of its stream.
    if len(status_line) < 2 or status_line[1] != b"200" or b'data: {"error"' in answer:
        text = answer.partition(b"\r\n\r\n")[2][:300].decode(errors="replace")
        raise StartupError(f"The warm-up request {method} {path} failed: {text or 'no answer'}")
    return speed


async def read_answer(
    reader: asyncio.StreamReader, clock: Callable[[], float] = time.monotonic
) -> tuple[bytes, float | None]:
    """Return the answer, and its tokens per second, measured from the second token on.

    The first token is left out, because it waits for the prompt and for everything that a first
    request loads.
    """
    answer, seen = b"", list[tuple[int, float]]()
    while piece := await reader.read(65536):
        answer += piece
        counts = _COUNT.findall(answer)
        if counts and (not seen or int(counts[-1]) > seen[-1][0]):
            seen.append((int(counts[-1]), clock()))
    if len(seen) < 4:
        return answer, None
    (first, started), (last, ended) = seen[1], seen[-1]
    return answer, (last - first) / max(ended - started, 1e-6)
