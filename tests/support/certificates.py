"""Creates self-signed certificates for this machine's address with the openssl command."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HAVE_OPENSSL = shutil.which("openssl") is not None


@dataclass(frozen=True)
class Files:
    """The files of a certificate and of its private key."""

    certificate: Path
    key: Path

    def put_at(self, other: Files) -> None:
        """Replace the files of `other` by these, one after the other, as a renewal does."""
        self.put_certificate_at(other)
        self.put_key_at(other)

    def put_certificate_at(self, other: Files) -> None:
        """Replace only the certificate of `other`."""
        _replace(self.certificate, other.certificate)

    def put_key_at(self, other: Files) -> None:
        """Replace only the private key of `other`."""
        _replace(self.key, other.key)


def _replace(source: Path, target: Path) -> None:
    copy = target.with_suffix(".new")
    shutil.copy(source, copy)
    os.replace(copy, target)


def make_certificate(folder: Path, *, password: str | None = None) -> Files:
    """Create a certificate and its private key in `folder`."""
    folder.mkdir(parents=True)
    files = Files(folder / "certificate.pem", folder / "key.pem")
    protection = ["-noenc"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-keyout", str(files.key), "-out", str(files.certificate), "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *protection,
        ],
        check=True,
        capture_output=True,
    )
    return files
