"""Binds the port before anything slow starts, then prepares the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import socket
from dataclasses import dataclass

from runtime.config.options import HttpArgs, ServerConfig
from runtime.errors import StartupError
from runtime.launch.prepare import PreparedEngine, prepare_engine
from runtime.launch.resolve import check_options
from server.entry.tenants import read_tenants
from server.tls import Certificate
from server.tracing import check_tracing

# The default bound of waiting requests. A trainer's rollout sends about this many at once. More of
# them would wait for minutes.
MAX_QUEUED_REQUESTS = 16_384


@dataclass(frozen=True)
class Prepared:
    """A prepared engine, the bound port, and the certificate for HTTPS (None for plain HTTP)."""

    engine: PreparedEngine
    listener: socket.socket
    certificate: Certificate | None

    @property
    def port(self) -> int:
        """The bound port, also if the option is 0, which lets the system choose."""
        return int(self.listener.getsockname()[1])


def prepare(config: ServerConfig) -> Prepared:
    """Check options, certificate, port, model folder and weight headers, in this order.

    Raises:
        StartupError: the first error found; its message has one line.
    """
    check_options(config)
    check_tracing(config.logging.otlp_traces_endpoint)
    _check_exposure(config.http)
    read_tenants(config.http)
    config = _with_bounded_queue(config)
    certificate = Certificate.wanted(config.http)
    listener = bind(config.http.host, config.http.port)
    try:
        return Prepared(prepare_engine(config), listener, certificate)
    except BaseException:
        listener.close()
        raise


def _with_bounded_queue(config: ServerConfig) -> ServerConfig:
    # Only the server has this bound. The offline engine's caller has all its requests in memory
    # anyway.
    if config.scheduling.max_queued_requests is not None:
        return config
    bounded = dataclasses.replace(config.scheduling, max_queued_requests=MAX_QUEUED_REQUESTS)
    return dataclasses.replace(config, scheduling=bounded)


def _check_exposure(http: HttpArgs) -> None:
    if http.api_key is not None or http.admin_api_key is not None or http.allow_open_admin:
        return
    if not is_loopback(http.host):
        raise StartupError(
            f"--host {http.host or '(all)'} lets others reach the routes that change the server "
            "(weights, cache, profiles), and no key guards them. Set HEADRACE_API_KEY and "
            "HEADRACE_ADMIN_API_KEY, or listen on 127.0.0.1, or add --allow-open-admin."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, an address or a name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    # Any other name might resolve to another machine later.
    return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port. It does not listen yet, because the start may still fail.

    Raises:
        StartupError: the address is in use, not permitted, or not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}.") from None
    listener = socket.socket(family, kind)
    # With this option, the port of a server that has just ended can be bound again at once. A port
    # that is in use is refused all the same.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError(describe_bind_error(error, host, port)) from None
    return listener


def describe_bind_error(error: OSError, host: str, port: int) -> str:
    """Return why the address cannot be bound, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use; stop what listens there or choose another with --port."
    if error.errno == errno.EACCES:
        return f"No permission to listen on port {port}; choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine."
    return f"Cannot listen on {host}:{port}: {error.strerror}."
