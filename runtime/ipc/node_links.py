"""Network links between the nodes of a worker: addresses, encryption, and closed connections."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from runtime.errors import StartupError

logger = logging.getLogger(__name__)

# If nothing is heard from a host for this long, the host or its network has failed. When a network
# stops for 10 s, messages arrive again after 13 s, because TCP doubles its waiting times.
SILENCE_S = 45.0
BEAT_INTERVAL_S = 1.0
# An idle TCP connection is probed, and is closed after the same time without an answer.
_KEEPALIVE_PROBES = 6
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_IDLE_S = int(SILENCE_S) - _KEEPALIVE_PROBES * _KEEPALIVE_INTERVAL_S
MAX_PORT = 65535
_LOOK_UP_PAUSE_S = 0.5
_SIOCGIFADDR = 0x8915
_SALT = b"headrace nodes 1"


@dataclass(frozen=True)
class LinkKey:
    """The CURVE key pair of the links, which all nodes derive from the key they share.

    CURVE is ZMQ's encryption. A peer must know the public key of the listening side, which is never
    sent. So only holders of the shared key can connect.
    """

    public: bytes
    secret: bytes

    @classmethod
    @cache
    def derive(cls, key: str) -> Self:
        """Derive the key pair from the nodes' shared key; this takes 50 ms."""
        secret = z85.encode(hashlib.scrypt(key.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=32))
        return cls(zmq.curve_public(secret), secret)

    def protect(self, socket: Any, *, listens: bool) -> None:
        """Let a socket speak only to holders of the key; call before it is bound or connected.

        `listens` says whether the socket is to be bound.
        """
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        if listens:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.public


def link_key(key: str) -> LinkKey | None:
    """Derive the encryption key pair of all nodes from the key that they share.

    Returns `None` if the shared key is empty: the links are then not encrypted.
    """
    return LinkKey.derive(key) if key else None


def keep_alive(socket: Any) -> None:
    """Make a socket notice when its peer's host vanishes; call before bind or connect."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)


def parse_address(text: str) -> tuple[str, int]:
    """Split a text `HOST:PORT` or `[IPV6]:PORT` into host and port.

    Raises:
        StartupError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise StartupError(
            f"--dist-init-addr must be HOST:PORT with a port in [1, {MAX_PORT}], got {text!r}."
        )
    return host, int(port)


def resolve_host(
    host: str,
    patience_s: float = 0.0,
    look_up: Callable[..., Sequence[Any]] = socket.getaddrinfo,
) -> str:
    """Return the first IP address of a host name; an address is returned as it is.

    Args:
        host: a host name or an address.
        patience_s: how long the name may stay unknown, seconds. For example, a pod's name is known
            only after the pod has started.
        look_up: a function that looks up names as `socket.getaddrinfo` does.

    Raises:
        StartupError: the name is unknown.
    """
    deadline = time.monotonic() + patience_s
    is_said = False
    while True:
        try:
            return str(look_up(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise StartupError(f"--dist-init-addr: {host}: {error.strerror}.") from None
            if not is_said:
                is_said = True
                logger.warning(
                    "--dist-init-addr: %s: %s; trying for %g s", host, error.strerror, patience_s
                )
        time.sleep(_LOOK_UP_PAUSE_S)


def is_private(ip: str) -> bool:
    """Whether an IP address is private, that is, not reachable over the Internet."""
    return ipaddress.ip_address(ip).is_private


def is_unspecified(ip: str) -> bool:
    """Whether an IP address stands for all addresses of a machine, as `0.0.0.0` and `::` do."""
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def is_local(ip: str) -> bool:
    """Whether an IP address belongs to this machine."""
    with socket.socket(_family(ip)) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def address_toward(ip: str, port: int) -> str:
    """Return this machine's address from which packets to `ip` are sent; nothing is sent now.

    Raises:
        StartupError: there is no route to `ip`.
    """
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, port))
        except OSError as error:
            raise StartupError(f"--dist-init-addr: no route to {ip}: {error.strerror}.") from None
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str | None:
    """Return the name of the network interface with the address `ip`; `None` if not found."""
    if ipaddress.ip_address(ip).is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
            contextlib.suppress(OSError),
        ):
            packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(packed[20:24]) == ip:
                return name
    return None


def tcp_endpoint(ip: str, port: int | None = None) -> str:
    """Return a TCP address in ZMQ's form; without a port, the system chooses one."""
    shown = f"[{ip}]" if ":" in ip else ip
    return f"tcp://{shown}:{'*' if port is None else port}"


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


class Connection:
    """Tells whether the connection of a connecting socket has closed.

    It stays open if the network only stops for a while. Listening sockets are not watched, because
    anything on the network may connect to them and disconnect again.
    """

    def __init__(self, socket: Any) -> None:
        """Watch `socket`, which must not be connected yet."""
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    @property
    def is_closed(self) -> bool:
        """Whether the connection has closed; each closing is reported to one call."""
        return bool(self._monitor.poll(0)) and bool(recv_monitor_message(self._monitor))

    def when_closed(self, call: Callable[[], None]) -> None:
        """Start a thread that calls `call` once the connection closes.

        The caller must not read `is_closed` afterwards.
        """

        def wait() -> None:
            recv_monitor_message(self._monitor)
            call()

        threading.Thread(target=wait, name="connection", daemon=True).start()
