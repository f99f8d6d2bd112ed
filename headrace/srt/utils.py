"""`load_image`, at the path from which documents import it."""

from __future__ import annotations

from headrace.media import load_image

__all__ = ["load_image"]
