"""The server's TLS certificate: read first at the start, and read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path

from runtime.config.options import HttpArgs
from runtime.errors import StartupError

logger = logging.getLogger(__name__)

# Seconds between checks of the files. Certificates are renewed weeks before they expire, so this
# need not be short.
CHECK_EVERY_S = 1.0

# Device, inode, size and time of change, which tell versions of a file apart.
_Identity = tuple[int, int, int, int]


class Certificate:
    """A TLS context that uses the newest certificate for each new connection.

    Open connections keep the certificate that they began with.

    Attributes:
        context: the TLS context of the listening socket.
    """

    def __init__(self, http: HttpArgs) -> None:
        """Read the files that the options `http` name.

        Raises:
            StartupError: the files cannot be used; the message has one line.
        """
        self._certfile = http.ssl_certfile or ""
        self._keyfile = http.ssl_keyfile
        self._password = http.ssl_keyfile_password
        self._ca_certs = http.ssl_ca_certs
        try:
            self._identities = self._identify()
            self._newest = self._load()
        except (OSError, ValueError) as error:
            raise StartupError(f"TLS: {_describe(error)}.") from None
        self.context = self._newest
        self.context.sni_callback = self._choose

    @staticmethod
    def wanted(http: HttpArgs) -> Certificate | None:
        """Return the certificate that the options name; `None` for plain HTTP.

        Raises:
            StartupError: the certificate cannot be used, or an option is given that needs one.
        """
        if http.ssl_certfile is not None:
            return Certificate(http)
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(http, name) is not None:
                raise StartupError(f"--{name.replace('_', '-')} needs --ssl-certfile.")
        return None

    async def follow(self) -> None:
        """Read the files again whenever they have changed, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self._look()

    def _look(self) -> None:
        try:
            identities = self._identify()
            if identities == self._identities:
                return
            self._newest = self._load()
        except (OSError, ValueError) as error:
            # Certificate and key do not match, probably because only one file has been replaced so
            # far. This is logged once, and tried again until they match.
            if self._identities:
                logger.warning("TLS: %s; the previous certificate stays in use.", _describe(error))
            self._identities = []
            return
        self._identities = identities
        logger.info("TLS: a new certificate is in use, from %s.", self._certfile)

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        del name, context
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        # Without a password, the empty one is passed: OpenSSL would ask for it at the terminal.
        context.load_cert_chain(self._certfile, self._keyfile, self._password or "")
        if self._ca_certs is not None:
            # The file completes the chain that the server sends. Clients need no certificate.
            context.load_verify_locations(self._ca_certs)
        return context

    def _identify(self) -> list[_Identity]:
        files = (self._certfile, self._keyfile, self._ca_certs)
        return _identities([file for file in files if file is not None])


def _identities(files: Sequence[str]) -> list[_Identity]:
    found = []
    for file in files:
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{file} is not a regular file")
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _describe(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return f"certificate and key cannot be used ({reason})"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
