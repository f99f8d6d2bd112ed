"""Holds the LoRA adapters of one rank: all loaded ones in host memory, some in device slots too.

A slot holds one adapter. On a GPU a slot is one block of memory, whose rows are the adapter's rank
dimension. So one copy of as many rows as the adapter's rank transfers the whole adapter. The copy
runs on a stream of its own while steps run; the first step that uses the slot waits for it. On a
CPU each linear layer has its own contiguous part of the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from kernels.lora import LoraPart, bank_width, make_bank
from runtime.checkpoint.peft_adapter import AdapterMatrix, AdapterSpec, module_kind
from runtime.config.lora_options import LoraLimits
from runtime.errors import InvalidRequest
from runtime.models.layers.adapter_slots import AdapterSlots
from runtime.models.layers.linear import Linear
from runtime.models.layers.parameter import WeightShard
from runtime.models.model import Model
from runtime.step.step_plan import AdapterCopy, Int32Array


@dataclass(frozen=True)
class _Place:
    """The columns of a slot that belong to one linear layer.

    Attributes:
        first: the layer's first column.
        in_features: number of the layer's inputs.
        shards: the parts of the layer's weight that adapters may change, such as `q` of `qkv_proj`,
            in the order of their rows.
    """

    first: int
    in_features: int
    shards: dict[str, WeightShard]

    @property
    def parts(self) -> list[LoraPart]:
        return [LoraPart(shard.offset, shard.num_rows) for shard in self.shards.values()]

    @property
    def width(self) -> int:
        return bank_width(self.in_features, self.parts)

    def columns(self, shard_name: str) -> tuple[slice, slice]:
        """Return the columns of the matrices A and B of one part of the layer's weight."""
        names = list(self.shards)
        index, rows = names.index(shard_name), [part.num_rows for part in self.parts]
        a = self.first + index * self.in_features
        b = self.first + len(names) * self.in_features + sum(rows[:index])
        return slice(a, a + self.in_features), slice(b, b + rows[index])


def _places(model: Model, targets: Sequence[str]) -> dict[str, _Place]:
    """Return the columns of each linear layer that adapters may change, by the layer's name."""
    wanted: dict[str, set[str]] = {}
    for weight in model.spec.logical_weights:
        if module_kind(weight.name.removesuffix(".weight")) in targets:
            holder_name, _, parameter = weight.target.rpartition(".")
            if parameter == "weight":
                wanted.setdefault(holder_name, set()).add(weight.shard)
    places: dict[str, _Place] = {}
    first = 0
    for name, holder in model.holders():
        if name not in wanted or not name.startswith("model.layers."):
            continue
        assert isinstance(holder, Linear), "adapters are of linear layers"
        shards = {key: shard for key, shard in holder.shards.items() if key in wanted[name]}
        some = next(iter(shards.values()))
        in_features = some.length if some.shard_dim == 1 else some.shape[1]
        places[name] = _Place(first, in_features, shards)
        first += places[name].width
    return places


class AdapterPool:
    """The loaded adapters of one rank, by the ids that the front process gives them.

    Attributes:
        size_bytes: bytes of device memory that the slots take.
    """

    def __init__(self, model: Model, slots: AdapterSlots, limits: LoraLimits) -> None:
        """Allocate the slots, and let the model's linear layers apply the adapters in them.

        Args:
            model: the loaded model.
            slots: tells the layers which slot each token of a step uses.
            limits: number of slots, largest rank, and names of the modules that adapters change.
        """
        device, dtype = model.context.device, model.context.dtype
        self._device = device
        self._places = _places(model, limits.target_modules)
        self._width = sum(place.width for place in self._places.values())
        num_slots, ranks = slots.num_slots, limits.max_rank
        self._ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._memory = torch.zeros(num_slots, ranks, self._width, dtype=dtype, device=device)
        self.size_bytes = self._memory.nbytes
        self._views: list[tuple[slice, Tensor]] = []
        holders = dict(model.holders())
        for name, place in self._places.items():
            columns = slice(place.first, place.first + place.width)
            if device.type == "cpu":
                # The rows of one layer are adjacent, so a step touches fewer memory pages.
                flat = self._memory.flatten(1)[:, ranks * columns.start : ranks * columns.stop]
                view = flat.unflatten(1, (ranks, place.width))
            else:
                view = self._memory[:, :, columns]
            self._views.append((columns, view))
            holder = holders[name]
            assert isinstance(holder, Linear)
            holder.adapt(make_bank(view, self._ranks, place.in_features, place.parts), slots)
        self._loaded: dict[int, Tensor] = {}
        self._held: list[int] = [0] * num_slots
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_their_way: set[int] = set()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def load(self, adapter_id: int, adapter: AdapterSpec) -> None:
        """Read this rank's part of an adapter from its file into host memory.

        Raises:
            InvalidRequest: the file cannot be read, or a value is not finite.
        """
        rows = torch.zeros(
            adapter.rank,
            self._width,
            dtype=self._memory.dtype,
            pin_memory=self._device.type == "cuda",
        )
        file = adapter.matrices[0].a.file
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for matrix in adapter.matrices:
                    if matrix.weight.target.rpartition(".")[0] not in self._places:
                        # The layer is in another pipeline stage.
                        continue
                    a = tensors.get_tensor(matrix.a.name)
                    b = tensors.get_tensor(matrix.b.name)
                    self._put(rows, matrix, a, b)
        except Exception as error:
            raise InvalidRequest(f"{file} cannot be read: {error}") from error
        if not rows.isfinite().all():
            # A product may read the rows of all slots, and zero times NaN is NaN. So a value that
            # is not finite would change the results of other requests.
            kind = str(rows.dtype).removeprefix("torch.")
            raise InvalidRequest(
                f"{file} has numbers that are NaN or infinite in {kind}, after lora_B is scaled; "
                "adapters must be finite"
            )
        self._loaded[adapter_id] = rows

    def unload(self, adapter_id: int) -> None:
        """Remove an adapter from host memory and free its slot; no request may use it any more."""
        self._loaded.pop(adapter_id, None)
        self._held = [0 if held == adapter_id else held for held in self._held]

    def _put(self, rows: Tensor, matrix: AdapterMatrix, a: Tensor, b: Tensor) -> None:
        place = self._places[matrix.weight.target.rpartition(".")[0]]
        shard = place.shards[matrix.weight.shard]
        if shard.shard_dim == 1:
            a = a.narrow(1, shard.start, shard.length)
        elif shard.shard_dim == 0:
            b = shard.local_part(b)
        to_a, to_b = place.columns(matrix.weight.shard)
        rows[: matrix.rank, to_a] = a.to(rows.dtype)
        rows[: matrix.rank, to_b] = (b.float() * matrix.scale).T.to(rows.dtype)

    def prepare(self, copies: Iterable[AdapterCopy], used: Int32Array) -> None:
        """Start copies into slots; let the coming step wait for the copies that it needs.

        Args:
            copies: the copies of the step's plan. An adapter that is already in its slot is not
                copied again.
            used: int32, the adapter slot of each row of the step; -1 for a row without an adapter.
        """
        for copy in copies:
            if self._held[copy.slot] != copy.adapter_id:
                self._copy(copy.slot, self._loaded[copy.adapter_id])
                self._held[copy.slot] = copy.adapter_id
        if self._on_their_way and self._on_their_way.intersection(used.tolist()):
            assert self._copied is not None
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._on_their_way.clear()

    def _copy(self, slot: int, rows: Tensor) -> None:
        rank = len(rows)
        if self._stream is None or self._copied is None:
            for columns, view in self._views:
                view[slot, :rank] = rows[:, columns]
            self._ranks[slot] = rank
            return
        # Steps that were launched earlier may still read the adapter that is overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._memory[slot, :rank].copy_(rows, non_blocking=True)
            self._ranks[slot].fill_(rank)
            self._copied.record(self._stream)
        self._on_their_way.add(slot)
