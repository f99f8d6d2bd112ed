"""The settings of the file tier, the third tier of the prefix cache."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.errors import StartupError

_OPTION = "--hicache-storage-backend-extra-config"


class PageFilesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON object of `--hicache-storage-backend-extra-config`.

    Attributes:
        path: folder of the files; it is created if it is absent.
        max_size_gb: most bytes of all files in the folder, in units of 1e9 bytes.
    """

    path: str
    max_size_gb: float = 100.0

    @classmethod
    def parse(cls, text: str | None) -> PageFilesConfig:
        """Read the option's value, and make the path absolute.

        Raises:
            StartupError: the text is absent or not such a JSON object, or a value is out of bounds;
                the message is one line.
        """
        if text is None:
            raise StartupError(
                "--hicache-storage-backend file needs a folder: "
                f'{_OPTION} \'{{"path": "/var/cache/headrace"}}\'.'
            )
        try:
            found = msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise StartupError(f"{_OPTION}: {error}.") from None
        if not found.path or "\0" in found.path:
            raise StartupError(f"{_OPTION}: path must name a folder.")
        if not 0 < found.max_size_gb < 1e9:
            raise StartupError(f"{_OPTION}: max_size_gb must be above 0 and below 1e9.")
        path = str(Path(found.path).expanduser().absolute())
        return cls(path=path, max_size_gb=found.max_size_gb)
