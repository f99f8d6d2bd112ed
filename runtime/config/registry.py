"""Registries that report an unknown name as the caller's error."""

from __future__ import annotations

from typing import TypeVar

from kernels import registry
from kernels.registry import load_object
from runtime.errors import InvalidRequest

__all__ = ["Registry", "load_object"]

T = TypeVar("T")


class Registry(registry.Registry[T]):
    """A registry that raises `InvalidRequest` for an unknown name."""

    error = InvalidRequest
