"""`ServerArgs`, where users' programs look for it."""

from __future__ import annotations

from headrace.engine.server_args import ServerArgs

__all__ = ["ServerArgs"]
