"""Chooses the back end of a program: the given one, or else the default of the process."""

from __future__ import annotations

import sys
from typing import Any, cast

from headrace.lang.backend.base import BaseBackend
from headrace.lang.backend.engine_backend import backend_of
from headrace.lang.global_config import global_config


def need_backend(given: Any = None) -> BaseBackend:
    """Return the given back end, or else the default; for a `Runtime`, return its endpoint.

    Raises:
        RuntimeError: no back end was given, and there is no default.
    """
    found = find_backend(given)
    if found is None:
        raise RuntimeError(
            "No back end: call set_default_backend(RuntimeEndpoint('http://HOST:PORT')), or "
            "pass backend=."
        )
    return found


def find_backend(given: Any = None) -> BaseBackend | None:
    """Return the given back end, or else the default, or else None."""
    chosen = global_config.default_backend if given is None else given
    return None if chosen is None else as_backend(chosen)


def as_backend(given: Any) -> BaseBackend:
    """Return `given` as a back end.

    A `Runtime` is replaced by its endpoint, and an offline `Engine` by an `EngineBackend`.

    Raises:
        TypeError: `given` has another type.
    """
    if isinstance(given, BaseBackend):
        return given
    endpoint = getattr(given, "endpoint", None)
    if isinstance(endpoint, BaseBackend):
        return endpoint
    engine = sys.modules.get("headrace.engine.engine")
    if engine is not None and isinstance(given, engine.Engine):
        return backend_of(given)
    # The object has a back end's methods but not its class, such as a user's test double.
    if hasattr(given, "async_generate_stream") and hasattr(given, "get_chat_template"):
        return cast("BaseBackend", given)
    raise TypeError(f"A back end is a BaseBackend, a Runtime or an Engine, not {given!r}.")
