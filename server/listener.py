"""The port, taken before anything slow starts, and the engine prepared for it."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.launch.prepare import PreparedEngine, prepare_engine
from runtime.launch.resolve import check_options
from server.tls import Certificate


@dataclass(frozen=True)
class Prepared:
    """A prepared engine, the port that it will be served on, and the certificate for HTTPS."""

    engine: PreparedEngine
    listener: socket.socket
    certificate: Certificate | None

    @property
    def port(self) -> int:
        """The port that is bound; differs from the option when that was 0."""
        return int(self.listener.getsockname()[1])


def prepare(config: ServerConfig) -> Prepared:
    """Check options, certificate, port, model folder and weight headers, in this order.

    Raises:
        StartupError: the first thing wrong, in one line.
    """
    check_options(config)
    certificate = Certificate.wanted(config.http)
    listener = bind(config.http.host, config.http.port)
    try:
        return Prepared(prepare_engine(config), listener, certificate)
    except BaseException:
        listener.close()
        raise


def bind(host: str, port: int) -> socket.socket:
    """Take the port without listening yet, so that nobody waits on a server that may not come.

    Raises:
        StartupError: the address is taken, not allowed or not ours.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}.") from None
    listener = socket.socket(family, kind)
    # A port left by a server that just ended may be taken at once; one in use may not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError(describe_bind_error(error, host, port)) from None
    return listener


def describe_bind_error(error: OSError, host: str, port: int) -> str:
    """Why the address cannot be had, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use; stop what listens there or choose another with --port."
    if error.errno == errno.EACCES:
        return f"No permission to listen on port {port}; choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine."
    return f"Cannot listen on {host}:{port}: {error.strerror}."
