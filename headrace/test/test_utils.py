"""`is_in_ci`, where documents look for it."""

from __future__ import annotations

from headrace.utils import is_in_ci

__all__ = ["is_in_ci"]
