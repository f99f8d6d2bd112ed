"""A feed-forward block of experts: a router, the experts, and one that all tokens pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.experts import PackedExperts, pack_experts
from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear, column
from runtime.models.layers.parameter import Parameter, Stored, WeightHolder, WeightShard

if TYPE_CHECKING:
    from runtime.models.quantization.method import DeviceMethod


class ExpertsStore(ABC):
    """The matrices of a layer's experts, as a method of quantization keeps them.

    Parameters and shards have the names of the plain ones: `gate_up` with `3.gate` and `3.up`,
    `down` with `3`.
    """

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters that a checkpoint fills."""

    @abstractmethod
    def pack(self, kept: list[tuple[str, str]]) -> PackedExperts:
        """Pack the filled tensors, so that products use them; see `Matrix.pack`."""

    @abstractmethod
    def plain(self, name: str) -> Tensor:
        """Return a parameter's value as `Parameter.restore` takes it; do not write to it."""

    @abstractmethod
    def part(self, name: str, shard_name: str) -> Tensor:
        """Return the part that a checkpoint tensor filled, as it was stored; do not write to it."""

    @abstractmethod
    def values(self, name: str, shard_name: str) -> Tensor:
        """Return the numbers that `part` stands for."""

    @abstractmethod
    def discard(self) -> None:
        """Drop tensors that were filled since the last `pack`."""

    @abstractmethod
    def release(self) -> None:
        """Release the memory."""


class Experts(WeightHolder):
    """The experts of one layer that this rank holds, or its part of each of them.

    Attributes:
        first, last: bounds of the experts on this rank.
        packed: computes them; `None` before they are loaded and after they are released.
    """

    def __init__(self, spec: ExpertsSpec, hidden: int, context: BuildContext) -> None:
        ranks = context.tp_size
        if context.splits_experts:
            part = spec.num_experts // ranks
            self.first, self.last = context.tp_rank * part, (context.tp_rank + 1) * part
            inner = column("", spec.intermediate_size, replace(context, tp_rank=0, tp_size=1))
        else:
            self.first, self.last = 0, spec.num_experts
            inner = column("", spec.intermediate_size, context)
        self._are_all_here = self.last - self.first == spec.num_experts
        self._spec, self._hidden, self._inner = spec, hidden, inner.length
        self._linear, self._implementation = context.linear, context.experts
        gate_up: dict[str, WeightShard] = {}
        down: dict[str, WeightShard] = {}
        tall, wide = (inner.size, hidden), (hidden, inner.size)
        for expert in range(spec.num_experts):
            place = expert - self.first
            is_here = self.first <= expert < self.last
            for index, name in enumerate(("gate", "up")):
                rows = (2 * place + index) * inner.length
                gate_up[f"{expert}.{name}"] = (
                    WeightShard(tall, rows, 0, inner.start, inner.length)
                    if is_here
                    else WeightShard(tall, 0, 0, 0, 0)
                )
            down[str(expert)] = (
                WeightShard(wide, place * hidden, 1, inner.start, inner.length)
                if is_here
                else WeightShard(wide, 0, 0, 0, 0)
            )
        count = self.last - self.first
        shapes = (count * 2 * inner.length, hidden), (count * hidden, inner.length)
        self._parameters = {
            "gate_up": Parameter(shapes[0], gate_up, context.dtype, context.device),
            "down": Parameter(shapes[1], down, context.dtype, context.device),
        }
        self.packed: PackedExperts | None = None
        self._store: ExpertsStore | None = None

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights; see `PackedExperts.choose`.

        Args:
            logits: `[num_tokens, num_experts]`, the router's.
        """
        spec = self._spec
        return self._loaded().choose(logits, spec.num_chosen, sums_to_one=spec.sums_to_one)

    def apply(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        """Return the sum of this rank's experts; see `PackedExperts`.

        Args:
            x: `[num_tokens, hidden_size]`.
            expert_ids: `[num_tokens, num_chosen]` int64, among all experts of the layer.
            weights: `[num_tokens, num_chosen]` float32.
            activation: activation of the gates.
        """
        packed = self._loaded()
        if self._are_all_here:
            return packed(x, expert_ids, weights, activation)
        count, local = self.last - self.first, expert_ids - self.first
        local = local.masked_fill((local < 0) | (local >= count), count)
        return packed(x, local, weights, activation)

    def _loaded(self) -> PackedExperts:
        if self.packed is None:
            raise RuntimeError("the weights of this layer were released")
        return self.packed

    def store(self, method: DeviceMethod, weights: Stored) -> None:
        mine = range(self.first, self.last)
        self._store = method.experts(self._parameters, weights, mine)
        if self._store is None:
            self._parameters = {
                name: method.parameter(parameter, weights.get(name, {}))
                for name, parameter in self._parameters.items()
            }

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        if self._store is not None:
            yield from self._store.parameters()
        else:
            yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Pack the filled weights and drop the plain ones."""
        if self._store is not None:
            self.packed = self._store.pack(kept)
            return
        if self.packed is not None:
            for name, shard_name in kept:
                self._parameters[name].rows(shard_name).copy_(self.part(name, shard_name))
        count, hidden, inner = self.last - self.first, self._hidden, self._inner
        gate_up = self._parameters["gate_up"].allocate().view(count, 2 * inner, hidden)
        down = self._parameters["down"].allocate().view(count, hidden, inner)
        self.discard()
        if self.packed is None:
            self.packed = pack_experts(gate_up, down, self._linear, self._implementation)
        else:
            self.packed.repack(gate_up, down)

    def discard(self) -> None:
        if self._store is not None:
            self._store.discard()
        for parameter in self._parameters.values():
            parameter.tensor = None

    def plain(self, name: str) -> Tensor:
        if self._store is not None:
            return self._store.plain(name)
        assert self.packed is not None, "the weights are not loaded"
        gate_up, down = self.packed.unpack()
        return (gate_up if name == "gate_up" else down).flatten(0, 1)

    def part(self, name: str, shard_name: str) -> Tensor:
        if self._store is not None:
            return self._store.part(name, shard_name)
        shard = self._parameters[name].shards[shard_name]
        if not shard.num_rows or self.packed is None:
            return self.plain(name)[:0]
        # Not `plain`, which unpacks all experts.
        gate_up, down = self.packed.unpack_one(int(shard_name.partition(".")[0]) - self.first)
        if name == "down":
            return down
        return gate_up[: self._inner] if shard_name.endswith("gate") else gate_up[self._inner :]

    def values(self, name: str, shard_name: str) -> Tensor:
        if self._store is not None:
            return self._store.values(name, shard_name)
        return self.part(name, shard_name)

    def release(self) -> None:
        self.discard()
        self.packed = None
        if self._store is not None:
            self._store.release()

    @property
    def size_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.size_bytes


class SparseMLP:
    """The block of experts that replaces a dense one."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden: int,
        activation: Activation,
        context: BuildContext,
        layer_idx: int,
        shared: SharedExpert | None,
    ) -> None:
        self._counts, self._layer_idx = context.expert_counts, layer_idx
        self._activation = activation
        self.router = Linear.replicated(hidden, spec.num_experts, False, context)
        self.experts = Experts(spec, hidden, context)
        self._reduce = context.all_reduce if context.tp_size > 1 else None
        self.shared = shared

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape, a new tensor."""
        expert_ids, weights = self.experts.choose(self.router.apply(hidden))
        if self._counts is not None:
            self._counts.note(self._layer_idx, expert_ids)
        out = self.experts.apply(hidden, expert_ids, weights, self._activation)
        if self._reduce is not None:
            out = self._reduce(out)
        return out if self.shared is None else self.shared.add_to(out, hidden)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""
        yield f"{prefix}.router", self.router
        yield f"{prefix}.experts", self.experts
        if self.shared is not None:
            yield from self.shared.holders(prefix)


class SharedExpert:
    """A block that every token passes, multiplied by its own gate."""

    def __init__(
        self,
        hidden: int,
        context: BuildContext,
        block: Callable[[Tensor], Tensor],
        holders: Callable[[str], Iterator[tuple[str, WeightHolder]]],
    ) -> None:
        self.gate = Linear.replicated(hidden, 1, False, context)
        self._block, self._holders = block, holders

    def add_to(self, out: Tensor, hidden: Tensor) -> Tensor:
        """Add the gated block of `hidden` to `out`, both `[num_tokens, hidden_size]`, in place."""
        return out.addcmul_(self._block(hidden), torch.sigmoid(self.gate.apply(hidden)))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""
        yield f"{prefix}.shared_gate", self.gate
        yield from self._holders(f"{prefix}.shared")
