"""Headrace: a small, fast LLM inference server with SGLang's native API and the OpenAI API."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("headrace")
except PackageNotFoundError:
    # A checkout on the path that nobody installed.
    __version__ = "0.0.0"
