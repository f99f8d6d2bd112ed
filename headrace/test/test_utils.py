"""`is_in_ci`, at the path from which documents import it."""

from __future__ import annotations

from headrace.utils import is_in_ci

__all__ = ["is_in_ci"]
