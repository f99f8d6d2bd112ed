"""Reads the keys of tenants. It imports no web framework, because the start needs it early."""

from __future__ import annotations

import hashlib
from pathlib import Path

from runtime.config.options import HttpArgs
from runtime.errors import StartupError

# Hexadecimal digits of a tenant's name.
_NAME_DIGITS = 16


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key; the server keeps only digests."""
    return hashlib.sha256(key).digest()


def read_tenants(http: HttpArgs) -> dict[bytes, str]:
    """Return the tenants: for each key in `--api-keys-file`, its digest and its owner's name.

    The name depends only on the key, not on its line in the file. So data that is stored under the
    name is found again after a change of the file.

    Raises:
        StartupError: the file cannot be read, is empty, or repeats a key or one of the operator's;
            or the operator's own keys are not set.
    """
    if http.api_keys_file is None:
        return {}
    if http.api_key is None or http.admin_api_key is None:
        raise StartupError("--api-keys-file needs --api-key and --admin-api-key, the operator's.")
    try:
        lines = Path(http.api_keys_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--api-keys-file {http.api_keys_file}: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise StartupError(f"--api-keys-file {http.api_keys_file} holds no key.")
    if len({*keys, http.api_key, http.admin_api_key}) < len(keys) + 2:
        raise StartupError(
            f"--api-keys-file {http.api_keys_file} holds a key twice, or one of the operator's."
        )
    # Names must not change with other lines of the file, because stored data has them.
    digests = [digest_of(key.encode()) for key in keys]
    return {digest: digest.hex()[:_NAME_DIGITS] for digest in digests}
