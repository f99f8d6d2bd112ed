"""Headrace: a small, fast LLM inference server with SGLang's native API and the OpenAI API."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.engine_errors import (
        EngineDeadError,
        EngineError,
        EngineOverloadedError,
        EngineStartError,
        FeatureNotSupportedError,
    )
    from headrace.engine.server_args import ServerArgs

__all__ = [
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineOverloadedError",
    "EngineStartError",
    "FeatureNotSupportedError",
    "ServerArgs",
    "__version__",
]

# Imported when first asked for: `import headrace` itself loads nothing.
_LAZY = {
    "Engine": "headrace.engine.engine",
    "EngineDeadError": "headrace.engine.engine_errors",
    "EngineError": "headrace.engine.engine_errors",
    "EngineOverloadedError": "headrace.engine.engine_errors",
    "EngineStartError": "headrace.engine.engine_errors",
    "FeatureNotSupportedError": "headrace.engine.engine_errors",
    "ServerArgs": "headrace.engine.server_args",
}

try:
    __version__ = version("headrace")
except PackageNotFoundError:
    # A checkout on the path that nobody installed.
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
