"""The experts of a layer: their matrices and biases, and the weighted sum of a token's experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.activation import Gate
from kernels.experts import ExpertBiases, PackedExperts, pack_experts
from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Output, column
from runtime.models.layers.parameter import Parameter, Stored, WeightHolder, WeightShard
from runtime.models.layers.stacked_experts import StackedParameter, stacked_parameters

if TYPE_CHECKING:
    from runtime.models.quantization.method import DeviceMethod


class ExpertsStore(ABC):
    """The matrices of a layer's experts as a quantization method stores them.

    Parameters and shards have the names that they have without quantization: parameter `gate_up`
    with shards `3.gate` and `3.up`, and parameter `down` with shard `3`, for expert 3.
    """

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters that a checkpoint fills."""

    @abstractmethod
    def pack(self, kept: list[tuple[str, str]]) -> PackedExperts:
        """Pack the filled tensors for the kernels; see `Matrix.pack`."""

    @abstractmethod
    def plain(self, name: str) -> Tensor:
        """Return the value of a parameter in the form that `Parameter.restore` takes.

        Do not write to it.
        """

    @abstractmethod
    def part(self, name: str, shard_name: str) -> Tensor:
        """Return the part of a parameter that one checkpoint tensor filled, in its stored form.

        Do not write to it.
        """

    @abstractmethod
    def values(self, name: str, shard_name: str) -> Tensor:
        """Return what `part` returns, but as floats instead of in its stored form."""

    @abstractmethod
    def discard(self) -> None:
        """Drop tensors that were filled after the last `pack`."""

    @abstractmethod
    def release(self) -> None:
        """Release the memory of the matrices."""


class Experts(WeightHolder):
    """The experts of one layer on this rank: some whole experts, or a part of each expert.

    Attributes:
        first, last: the experts on this rank are those with `first <= index < last`.
        packed: the experts in the layout of their kernels; `None` before they are loaded and after
            they are released.
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
        self._biases: dict[str, Parameter] = {}
        self._parameters: dict[str, Parameter]
        if spec.stacked is None:
            self._parameters = self._of_each(inner, context)
            if spec.has_bias:
                self._biases = self._biases_of_each(context)
        else:
            mine = range(self.first, self.last)
            self._parameters = {
                name: stacked_parameters(spec, name, hidden, inner, mine, context)
                for name in ("gate_up", "down")
            }
            if spec.has_bias:
                self._biases = {
                    name: stacked_parameters(spec, name, hidden, inner, mine, context)
                    for name in ("gate_up_bias", "down_bias")
                }
        self._adds_down_bias = context.splits_experts or context.tp_rank == 0
        for bias in self._biases.values():
            bias.allocate()
        self.packed: PackedExperts | None = None
        self._store: ExpertsStore | None = None

    def _of_each(self, inner: Output, context: BuildContext) -> dict[str, Parameter]:
        """Return the parameters for a checkpoint that stores tensors of each expert."""
        hidden = self._hidden
        gate_up: dict[str, WeightShard] = {}
        down: dict[str, WeightShard] = {}
        tall, wide = (inner.size, hidden), (hidden, inner.size)
        for expert in range(self._spec.num_experts):
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
        return {
            "gate_up": Parameter(shapes[0], gate_up, context.dtype, context.device),
            "down": Parameter(shapes[1], down, context.dtype, context.device),
        }

    def _biases_of_each(self, context: BuildContext) -> dict[str, Parameter]:
        """Return the biases, `[experts * outputs]`, for a checkpoint with one tensor per expert."""
        found: dict[str, Parameter] = {}
        for name, matrix in self._parameters.items():
            shards = {}
            for shard_name, shard in matrix.shards.items():
                # Ranks split the rows of gate and up only. They split the columns of down, so its
                # bias is whole.
                is_cut = shard.shard_dim == 0
                shards[shard_name] = WeightShard(
                    shard.shape[:1], shard.offset, 0,
                    shard.start if is_cut else 0, shard.num_rows,
                )  # fmt: skip
            rows = matrix.shape[:1]
            found[f"{name}_bias"] = Parameter(rows, shards, context.dtype, context.device)
        return found

    def choose(self, logits: Tensor, *, sums_to_one: bool) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights; see `PackedExperts.choose`.

        Args:
            logits: `[num_tokens, num_experts]`, from the router.
            sums_to_one: whether a token's weights are scaled to a sum of one.
        """
        return self._loaded().choose(logits, self._spec.num_chosen, sums_to_one=sums_to_one)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, activation: Gate) -> Tensor:
        """Return the weighted sum of the results of this rank's experts; see `PackedExperts`.

        Args:
            x: `[num_tokens, hidden_size]`.
            expert_ids: `[num_tokens, num_chosen]` int64, among all experts of the layer.
            weights: `[num_tokens, num_chosen]` float32.
            activation: how gate and up are combined.
        """
        packed, biases = self._loaded(), None
        if self._biases:
            count = self.last - self.first
            gate_up, down = (
                self._biases[name].allocate().view(count, -1)
                for name in ("gate_up_bias", "down_bias")
            )
            biases = ExpertBiases(gate_up, down if self._adds_down_bias else None)
        if self._are_all_here:
            return packed(x, expert_ids, weights, activation, biases)
        count, local = self.last - self.first, expert_ids - self.first
        local = local.masked_fill((local < 0) | (local >= count), count)
        return packed(x, local, weights, activation, biases)

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
        yield from self._biases.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Pack the filled weights and drop the unpacked ones."""
        if self._store is not None:
            self.packed = self._store.pack(kept)
            return
        if self.packed is not None:
            for name, shard_name in kept:
                if name in self._parameters:
                    self._parameters[name].fill(shard_name, self.part(name, shard_name))
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
        if name in self._biases:
            return self._biases[name].allocate()
        if self._store is not None:
            return self._store.plain(name)
        assert self.packed is not None, "the weights are not loaded"
        gate_up, down = self.packed.unpack()
        return (gate_up if name == "gate_up" else down).flatten(0, 1)

    def part(self, name: str, shard_name: str) -> Tensor:
        if name in self._biases:
            bias = self._biases[name]
            if isinstance(bias, StackedParameter):
                return bias.stored(self.plain(name))
            return super().part(name, shard_name)
        if self._store is not None:
            return self._store.part(name, shard_name)
        parameter = self._parameters[name]
        if isinstance(parameter, StackedParameter):
            return parameter.stored(self.plain(name))
        shard = parameter.shards[shard_name]
        if not shard.num_rows or self.packed is None:
            return self.plain(name)[:0]
        # `plain` would unpack all experts, but only one is needed.
        gate_up, down = self.packed.unpack_one(int(shard_name.partition(".")[0]) - self.first)
        if name == "down":
            return down
        return gate_up[: self._inner] if shard_name.endswith("gate") else gate_up[self._inner :]

    def values(self, name: str, shard_name: str) -> Tensor:
        if self._store is not None and name not in self._biases:
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
