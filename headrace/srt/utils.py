"""`load_image`, where documents look for it."""

from __future__ import annotations

from headrace.media import load_image

__all__ = ["load_image"]
