"""Reads JSON files of model folders; errors have the file and the key. No torch."""

from __future__ import annotations

import json
from io import BufferedReader
from pathlib import Path
from typing import Any

from runtime.checkpoint.regular_file import open_regular
from runtime.errors import StartupError

MAX_JSON_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
        StartupError: the file is not a regular one, cannot be read, is too large, or is not a JSON
            object; the message has one line.
    """
    try:
        with BufferedReader(open_regular(path)) as file:
            # The file is read up to the limit, because some files are longer than their size says.
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise StartupError(f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB")
        value = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds {type(value).__name__}, expected an object")
    return value


class Keys:
    """Reads the keys of a JSON object with checks of their types; null counts as absent."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        """Read `values`; `source`, such as the file's path, is for error messages."""
        self.source = source
        self.values = values

    def error(self, key: str, expected: str) -> StartupError:
        """Return the error that `key` is missing or not `expected`, a text such as `a number`."""
        if self.values.get(key) is None:
            return StartupError(f"{self.source}: {key!r} is missing; expected {expected}")
        shown = repr(self.values[key])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return StartupError(f"{self.source}: {key!r} is {shown}; expected {expected}")

    def integer(self, key: str, high: int, default: int | None = None, *, low: int = 1) -> int:
        """Return a key's value, an integer in `[low, high]`.

        Raises:
            StartupError: the key is absent and there is no `default`, or the value is wrong.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a key's value, a finite number in `[low, high]`.

        Raises:
            StartupError: the key is absent and there is no `default`, or the value is wrong.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            # NaN is refused here too. The number may be an integer too long for a float.
            or not low <= value <= high
        ):
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a key's value, a boolean.

        Raises:
            StartupError: the value is not a boolean.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a key's value, an object; empty if the key is absent.

        Raises:
            StartupError: the value is not an object.
        """
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return value

    def token_ids(self, key: str) -> list[int]:
        """Return a key's value, one token id or a list of them, as a list; empty if absent.

        Raises:
            StartupError: the value is something else.
        """
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            raise self.error(key, "a token id or a list of token ids")
        return ids
