"""The APIs to which routes belong; the API decides the format of a route's errors."""

from __future__ import annotations

from enum import Enum


class Dialect(Enum):
    """The API that a route belongs to."""

    NATIVE = "native"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"

    @classmethod
    def of_path(cls, path: str) -> Dialect:
        """Return the API of `path`, for paths whose router does not name an API."""
        return cls.OPENAI if path.startswith("/v1/") else cls.NATIVE
