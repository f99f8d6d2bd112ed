"""In whose words a route speaks, so that its errors have the shape that its clients read."""

from __future__ import annotations

from enum import Enum


class Dialect(Enum):
    """Whose API a route belongs to."""

    NATIVE = "native"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"

    @classmethod
    def of_path(cls, path: str) -> Dialect:
        """The dialect of a path that belongs to no router which says otherwise."""
        return cls.OPENAI if path.startswith("/v1/") else cls.NATIVE
