"""Functions for notebooks that send a JSON request over HTTP, or download a file once."""

from __future__ import annotations

import json as json_module
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})


class HttpResponse:
    """An HTTP response with any status, including errors.

    Attributes:
        status_code: the HTTP status.
    """

    def __init__(self, response: httpx.Response, client: httpx.Client) -> None:
        self._response = response
        self._client = client
        self.status_code = response.status_code

    @property
    def text(self) -> str:
        """The body of the response as text."""
        self._response.read()
        return self._response.text

    def json(self) -> Any:
        """Decode the body of the response from JSON."""
        return json_module.loads(self.text)

    def iter_lines(
        self,
        chunk_size: int = 512,  # noqa: ARG002  # the signature of `requests`
        decode_unicode: bool = False,
    ) -> Iterator[Any]:
        r"""Yield the body's lines as they arrive, as bytes or as text; only `\n` ends a line."""
        rest = b""
        for chunk in self._response.iter_bytes():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield _shown(line, decode_unicode)
        if rest:
            yield _shown(rest, decode_unicode)
        self.close()

    def close(self) -> None:
        """Close the connection; closing a stream early ends its request on the server."""
        self._response.close()
        self._client.close()

    def __enter__(self) -> HttpResponse:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _shown(line: bytes, decode_unicode: bool) -> bytes | str:
    line = line.removesuffix(b"\r")
    return line.decode() if decode_unicode else line


def http_request(
    url: str,
    json: Any = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: Any = None,
    method: str | None = None,
) -> HttpResponse:
    """Send one request and return its response; an error status does not raise.

    Args:
        url: the target.
        json: the body as a JSON value.
        stream: return as soon as the status has arrived; read the body with `iter_lines`.
        api_key: sent as `Authorization: Bearer`.
        verify: whether to check the server's certificate, or a file of trusted authorities.
        method: the HTTP method; by default POST with a body and GET without.

    Raises:
        httpx.HTTPError: the server sent no response.
    """
    import httpx

    headers = {"Content-Type": "application/json; charset=utf-8"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    client = httpx.Client(
        timeout=httpx.Timeout(None, connect=10.0),
        verify=_verification(verify),
        # Proxies from the environment are ignored for this machine, whose ports they cannot reach.
        trust_env=urllib.parse.urlsplit(url).hostname not in _LOOPBACK,
    )
    method = method or ("GET" if json is None and not stream else "POST")
    content = None if json is None else json_module.dumps(json).encode()
    try:
        request = client.build_request(method, url, content=content, headers=headers)
        response = client.send(request, stream=True)
        answer = HttpResponse(response, client)
        if not stream:
            response.read()
            client.close()
    except BaseException:
        client.close()
        raise
    return answer


def _verification(verify: Any) -> Any:
    import ssl

    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    return True if verify is None else verify


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """Download a file, unless it was downloaded before, and return its path.

    Args:
        url: the file's URL.
        filename: path for the file; by default the last part of the URL, in the folder for
            temporary files.

    Raises:
        httpx.HTTPError: the download failed; then no file is left at `filename`.
    """
    path = Path(filename or Path(tempfile.gettempdir()) / url.rstrip("/").split("/")[-1])
    if path.is_file():
        return str(path)
    import httpx
    from tqdm.auto import tqdm

    with httpx.stream("GET", url, follow_redirects=True, timeout=30.0) as response:
        response.raise_for_status()
        total = int(response.headers.get("content-length", 0)) or None
        with (
            tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part,
            tqdm(total=total, unit="B", unit_scale=True, desc=path.name) as bar,
        ):
            try:
                for chunk in response.iter_bytes():
                    part.write(chunk)
                    bar.update(len(chunk))
            except BaseException:
                Path(part.name).unlink()
                raise
    # The complete file is renamed to its path, so other programs never read a part of it.
    Path(part.name).rename(path)
    return str(path)
