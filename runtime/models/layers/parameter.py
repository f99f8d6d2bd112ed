"""Tensors that a checkpoint fills, and the rule by which each rank takes its part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes.

    Attributes:
        shape: of the whole checkpoint tensor.
        offset: first row of the parameter that it fills.
        shard_dim: dimension cut among ranks; `None` when every rank takes it whole.
        start, length: this rank's part along `shard_dim`.
    """

    shape: tuple[int, ...]
    offset: int = 0
    shard_dim: int | None = None
    start: int = 0
    length: int = 0

    def local_part(self, whole: Tensor) -> Tensor:
        """Return this rank's view of the checkpoint tensor."""
        if self.shard_dim is None:
            return whole
        return whole.narrow(self.shard_dim, self.start, self.length)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(
            self.length if dim == self.shard_dim else size for dim, size in enumerate(self.shape)
        )

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that this slot fills."""
        return self.length if self.shard_dim == 0 else self.shape[0]


class Parameter:
    """A tensor of this rank, filled slot by slot.

    Attributes:
        shape: of this rank's tensor.
        slots: by name; a parameter that one checkpoint tensor fills has the slot `""`.
        tensor: `None` until memory is needed, and again once the holder has packed it away.
    """

    __slots__ = ("device", "dtype", "shape", "slots", "tensor")

    def __init__(
        self,
        shape: tuple[int, ...],
        slots: Mapping[str, Slot],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.slots = dict(slots)
        self.dtype = dtype
        self.device = device
        self.tensor: Tensor | None = None

    def allocate(self) -> Tensor:
        """Return the tensor, uninitialised when it had no memory yet."""
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.tensor

    def rows(self, slot_name: str) -> Tensor:
        """Return the view that `slot_name` fills."""
        slot = self.slots[slot_name]
        return self.allocate().narrow(0, slot.offset, slot.num_rows)

    def fill(self, slot_name: str, tensor: Tensor) -> None:
        """Copy a checkpoint tensor, or this rank's part of it, into its slot, cast to our dtype."""
        slot = self.slots[slot_name]
        is_part = tuple(tensor.shape) == slot.local_shape
        self.rows(slot_name).copy_(tensor if is_part else slot.local_part(tensor))


class WeightHolder(ABC):
    """A layer that owns parameters."""

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield `weight` and, where there is one, `bias`."""

    @abstractmethod
    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Make what was filled effective.

        Args:
            kept: (parameter, slot) pairs that were not filled and keep their present value; only
                an update of a live model has any.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop what was filled since the last `finalize`; called when a load fails half-way."""

    @abstractmethod
    def plain(self, name: str) -> Tensor:
        """Return this rank's present value of a parameter in the plain layout, once finalized.

        The tensor may share memory with the live one: do not write into it.
        """

    @abstractmethod
    def release(self) -> None:
        """Give large matrices' memory back; to be used again they must be filled and finalized."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes held."""


def whole(shape: tuple[int, ...]) -> dict[str, Slot]:
    """Return the slots of a parameter that one tensor fills and every rank holds entirely."""
    return {"": Slot(shape)}
