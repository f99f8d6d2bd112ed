"""Fetches images from URLs: only from public hosts, with limits on time and size.

A name is resolved once. All of its addresses must be public, and the connection is made to one of
them. So a name that resolves to another address a moment later has no effect. A redirect is checked
like the first URL.

Source: attacks on the fetchers of other servers, CVE-2026-24779, -25960, -34753 and similar ones.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import certifi
import httpcore

from runtime.errors import InvalidRequest, Overloaded
from runtime.eventloop.offload import OffloadPool
from runtime.media.image_source import MAX_IMAGE_BYTES, too_many_bytes
from runtime.media.media_policy import MediaPolicy

# Networks in which an IPv6 address has an IPv4 address in its last 32 bits.
_HOLD_IPV4 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
# Networks that are not public although Python says so: benchmarks; the anycast of relays; Oracle's
# and Azure's addresses at which their clouds give machines secrets.
_REFUSED_IPV4 = tuple(
    map(
        ipaddress.IPv4Network,
        ("198.18.0.0/15", "192.88.99.0/24", "192.0.0.0/24", "168.63.129.16/32"),
    )
)
# A network for documentation since 2024, which some Python versions do not know.
_REFUSED_IPV6 = ipaddress.IPv6Network("3fff::/20")
_LOW_32_BITS = 2**32 - 1


def is_public(text: str) -> bool:
    """Whether an IP address is public, and does not embed another address that is not public."""
    try:
        # An address may have a zone, which names an interface of this machine; it is refused below.
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return _is_public_ipv4(address)
    if address.scope_id is not None:
        return False
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _HOLD_IPV4):
        inner.append(ipaddress.IPv4Address(int(address) & _LOW_32_BITS))
    if any(each is not None and not _is_public_ipv4(each) for each in inner):
        return False
    if address.ipv4_mapped is not None:
        return True
    return _is_open(address) and not address.is_site_local and address not in _REFUSED_IPV6


def _is_public_ipv4(address: ipaddress.IPv4Address) -> bool:
    return _is_open(address) and not any(address in network for network in _REFUSED_IPV4)


def _is_open(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and not address.is_loopback
        and not address.is_link_local
    )


TIMEOUT_S = 10.0
MAX_REDIRECTS = 3
MAX_FETCHES = 32
_MAX_URL_CHARS = 8192
_MAX_ADDRESSES = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
# Characters that all programs read in the same way in a URL.
_PLAIN = re.compile(r"[!-\[\]-~]+")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_HEADERS = (
    (b"Accept", b"image/png,image/jpeg,image/webp,image/gif"),
    # Compression is not accepted, so that the size of the response is the size of the content.
    (b"Accept-Encoding", b"identity"),
    (b"User-Agent", b"headrace"),
)

Resolve = Callable[[str, int], Awaitable[list[str]]]

# Threads, because the system's resolver blocks and has time-outs of its own.
_RESOLVING = OffloadPool("resolution of a name", workers=4, max_queued=256, timeout_s=5.0)


@dataclass(frozen=True)
class _Address:
    """A parsed URL. It is parsed once, so that what is used is exactly what was checked."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"

    @property
    def host_header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_usual = self.port == _PORTS[self.scheme]
        return (host if is_usual else f"{host}:{self.port}").encode("ascii")


class _Refused(Exception):
    """A URL is refused, or gives no image; the message is for the client."""


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, whatever the host's name resolves to now."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,  # noqa: ARG002  it was resolved
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the library's name
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        for address in self._addresses[:-1]:
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(
            self._addresses[-1], port, timeout, local_address, socket_options
        )


class Fetcher:
    """Fetches image files from URLs in requests."""

    def __init__(
        self,
        policy: MediaPolicy,
        *,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] = is_public,
        timeout_s: float = TIMEOUT_S,
        max_parallel: int = MAX_FETCHES,
    ) -> None:
        """Prepare to fetch files.

        Args:
            policy: from which hosts files may be fetched.
            resolve: returns the addresses of a host; by default the system's resolver.
            is_allowed: whether an address may be connected to.
            timeout_s: seconds for one file, including redirects.
            max_parallel: most files that are fetched at a time.
        """
        self._policy = policy
        self._resolve = resolve or _resolve
        self._is_allowed = is_allowed
        self._timeout_s = timeout_s
        self._max_parallel = max_parallel
        self._num_running = 0

    async def fetch(self, url: str, param: str) -> bytes:
        """Return the content of the file at `url`.

        Args:
            url: the URL in the request.
            param: the image's path in the request, for errors.

        Raises:
            InvalidRequest: the file must not or cannot be fetched, or is too large.
            Overloaded: too many images are being fetched.
        """
        if not self._policy.fetches:
            raise InvalidRequest(
                f"{param}: addresses are not fetched here (--allow-media-domains and "
                "--allow-media-urls allow it). Send the image as base64 or as a data URL.",
                param=param,
            )
        if self._num_running >= self._max_parallel:
            raise Overloaded("The server is fetching images for too many other requests.")
        self._num_running += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, param)
        except TimeoutError:
            reason = f"it was not there within {self._timeout_s:g} s"
        except _Refused as error:
            reason = str(error)
        # These are all errors that the other server can cause. Errors of `ssl` are OSErrors.
        except (httpcore.ProtocolError, httpcore.NetworkError, httpcore.TimeoutException, OSError):
            reason = "the connection failed"
        finally:
            self._num_running -= 1
        raise InvalidRequest(f"{param}: the image cannot be fetched: {reason}.", param=param)

    async def _follow(self, url: str, param: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            address = _parse(url)
            found = await self._get(address, await self._checked(address), param)
            if isinstance(found, bytes):
                return found
            url = urllib.parse.urljoin(address.text, found)
        raise _Refused(f"it redirects more than {MAX_REDIRECTS} times")

    async def _checked(self, address: _Address) -> list[str]:
        """Return the addresses to connect to, all of them checked."""
        if not self._policy.allows_host(address.host):
            raise _Refused("its host is not among --allow-media-domains")
        try:
            found = await self._resolve(address.host, address.port)
        except (OSError, UnicodeError):
            raise _Refused("its host cannot be found") from None
        if not found:
            raise _Refused("its host cannot be found")
        if not all(map(self._is_allowed, found)):
            raise _Refused("its host is not on the public network")
        return found[:_MAX_ADDRESSES]

    async def _get(self, address: _Address, connect_to: list[str], param: str) -> bytes | str:
        """Return the file's content, or the target of a redirect as a `str`."""
        url = httpcore.URL(
            scheme=address.scheme.encode(),
            host=address.host.encode(),
            port=address.port,
            target=address.target.encode(),
        )
        headers = [(b"Host", address.host_header), *_HEADERS]
        pool = httpcore.AsyncConnectionPool(
            ssl_context=_tls() if address.scheme == "https" else None,
            network_backend=_Pinned(connect_to),
            max_connections=1,
            retries=0,
        )
        async with pool, pool.stream("GET", url, headers=headers) as answer:
            received = {name.lower(): value for name, value in answer.headers}
            if answer.status in _REDIRECTS and b"location" in received:
                return received[b"location"].decode("latin-1")
            if answer.status != 200:
                raise _Refused(f"its server answers with status {answer.status}")
            if received.get(b"content-encoding", b"identity").lower() != b"identity":
                raise _Refused("its server sends it compressed")
            length = received.get(b"content-length", b"0")
            if length.isdigit() and int(length) > MAX_IMAGE_BYTES:
                raise too_many_bytes(param)
            content = bytearray()
            async for part in answer.aiter_stream():
                content += part
                if len(content) > MAX_IMAGE_BYTES:
                    raise too_many_bytes(param)
            return bytes(content)


def _parse(url: str) -> _Address:
    if len(url) > _MAX_URL_CHARS or _PLAIN.fullmatch(url) is None:
        raise _Refused("its address must be plain ASCII without spaces and backslashes")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port
    except ValueError:
        raise _Refused("its address cannot be read") from None
    if parts.scheme not in _PORTS:
        raise _Refused("its address must begin with http:// or https://")
    if "@" in parts.netloc:
        raise _Refused("its address must not hold a user's name")
    is_ipv6 = parts.netloc.startswith("[")
    if not is_ipv6 and _NAME.fullmatch(host) is None:
        raise _Refused("its address has no proper host")
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    return _Address(parts.scheme, host, port or _PORTS[parts.scheme], target)


async def _resolve(host: str, port: int) -> list[str]:
    found = await _RESOLVING.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


@cache
def _tls() -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities of this machine and of `certifi`.

    Making it is slow.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
