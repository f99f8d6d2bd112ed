"""The API dialect of a route, so that errors have the shape that its clients expect."""

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
        """The dialect of a path whose router does not set one."""
        return cls.OPENAI if path.startswith("/v1/") else cls.NATIVE
