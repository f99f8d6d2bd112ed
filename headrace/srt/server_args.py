"""`ServerArgs`, at the path from which users' programs import it."""

from __future__ import annotations

from headrace.engine.server_args import ServerArgs

__all__ = ["ServerArgs"]
