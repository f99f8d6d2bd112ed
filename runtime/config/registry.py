"""Registries that raise `InvalidRequest` for an unknown name."""

from __future__ import annotations

from typing import TypeVar

from kernels import registry
from kernels.registry import load_object
from runtime.errors import InvalidRequest

__all__ = ["Registry", "load_object"]

T = TypeVar("T")


class Registry(registry.Registry[T]):
    """A table of objects by name; an unknown name raises `InvalidRequest`."""

    error = InvalidRequest
