"""Keeps one rank's adapters (LoRA): all loaded ones in host memory, some also in device slots.

On a GPU a slot is one piece of memory, rank by rank, so that an adapter comes to the device in a
single copy of as many ranks as it has. The copy runs beside the steps; the first step that uses the
slot waits for it. On a CPU each product has its own piece.
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
    """Where the numbers of one product are among the columns of a slot.

    Attributes:
        first: its first column.
        shards: the parts of its weight that adapters may change, in the order of their rows.
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
        """Columns of A and of B of one part."""
        names = list(self.shards)
        index, rows = names.index(shard_name), [part.num_rows for part in self.parts]
        a = self.first + index * self.in_features
        b = self.first + len(names) * self.in_features + sum(rows[:index])
        return slice(a, a + self.in_features), slice(b, b + rows[index])


def _places(model: Model, targets: Sequence[str]) -> dict[str, _Place]:
    """Return the places of all products that adapters may change, by the layers' names."""
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
    """Adapters by their ids, which the front gives them.

    Attributes:
        size_bytes: bytes that the slots take on the device.
    """

    def __init__(self, model: Model, slots: AdapterSlots, limits: LoraLimits) -> None:
        """Allocate the slots, and have the model's layers add the adapters in the slots.

        Args:
            model: loaded.
            slots: the adapter slots of the model's context.
            limits: number of slots, ranks and modules.
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
                # Rows of one product side by side: fewer pages of memory for a step to touch.
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
        """Read this rank's part of an adapter into host memory.

        Raises:
            InvalidRequest: the files have changed since they were checked, or a number is not
                finite.
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
                    a = tensors.get_tensor(matrix.a.name)
                    b = tensors.get_tensor(matrix.b.name)
                    self._put(rows, matrix, a, b)
        except Exception as error:
            raise InvalidRequest(f"{file} cannot be read: {error}") from error
        if not rows.isfinite().all():
            # Products take the rows of all slots: zero times such a number reaches other requests.
            kind = str(rows.dtype).removeprefix("torch.")
            raise InvalidRequest(
                f"{file} has numbers that are NaN or infinite in {kind}, after lora_B is scaled; "
                "adapters must be finite"
            )
        self._loaded[adapter_id] = rows

    def unload(self, adapter_id: int) -> None:
        """Forget an adapter; no row uses it any more."""
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
        """Start copies into slots, and make the coming step wait for the copies that it uses.

        Args:
            copies: the step's copies. An adapter that its slot already holds is not copied again.
            used: the slot of each of the step's rows; -1 for a row without an adapter.
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
        # Steps that were launched may still read what the slot held.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._memory[slot, :rank].copy_(rows, non_blocking=True)
            self._ranks[slot].fill_(rank)
            self._copied.record(self._stream)
        self._on_their_way.add(slot)
