"""Experts in MXFP4 on the device: grouped products on a GPU, a product per expert on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from kernels.experts import PackedExperts, pack_experts
from kernels.experts.reference import LoopedExperts
from kernels.group_linear import MXFP4_GROUP, Grouped, GroupedLinear, code_e2m1
from kernels.group_linear import pack as pack_linear
from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored
from runtime.models.layers.stacked_experts import StackedParameter
from runtime.models.quantization.method import DeviceMethod, multiplies_codes
from runtime.models.quantization.mxfp4.blocks import (
    BlocksParameter,
    BytesParameter,
    to_blocks,
    to_codes,
)
from runtime.models.quantization.mxfp4.front import Mxfp4Quantization

if TYPE_CHECKING:
    from kernels.experts.triton_coded import CodedExperts

logger = logging.getLogger(__name__)

_NAMES: tuple[Literal["gate_up", "down"], ...] = ("gate_up", "down")


class Device(DeviceMethod):
    """Keeps experts in MXFP4 blocks if kernels can multiply by them; converts others to floats."""

    def __init__(self, quantization: Quantization) -> None:
        assert isinstance(quantization, Mxfp4Quantization)
        self._quantization = quantization
        self._num_widened = 0

    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:  # noqa: ARG002
        return plain

    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:  # noqa: ARG002
        return None

    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        of_each = [weight for of_name in weights.values() for weight in of_name.values()]
        if not any(map(self._quantization.is_in_codes, of_each)):
            return None
        implementations = self.implementation, self.experts_implementation
        store = Mxfp4Experts(plain, len(mine), implementations)
        self._num_widened += store.is_widened
        return store

    def report(self) -> None:
        if self._num_widened:
            logger.info(
                "Widened while they load: experts of %d layers in MXFP4 (no kernel fits the type, "
                "or a rank's part does not end where blocks end)",
                self._num_widened,
            )


class Mxfp4Experts(ExpertsStore):
    """The MXFP4 blocks of a layer's experts.

    Attributes:
        is_widened: whether blocks are converted to floats, because no kernel supports them here.
    """

    def __init__(
        self,
        plain: Mapping[str, Parameter],
        num_experts: int,
        implementations: tuple[str | None, str | None],
    ) -> None:
        """Choose how the experts are computed; memory is taken only by `pack`.

        Args:
            plain: the parameters in 16 bits, by name.
            num_experts: number of experts on this rank.
            implementations: names of the linear and the experts implementation for widened
                matrices.
        """
        self._num_experts, self._implementations = num_experts, implementations
        self._blocks: dict[str, BlocksParameter] = {}
        for name in _NAMES:
            parameter = plain[name]
            assert isinstance(parameter, StackedParameter), "MXFP4 has a tensor of all experts"
            columns = parameter.shards[""].shape[1 if parameter.is_transposed else 2]
            scale = BytesParameter(parameter, (columns // MXFP4_GROUP,))
            self._blocks[name] = BlocksParameter(parameter, scale)
        first = plain["gate_up"]
        self._dtype = first.dtype
        is_whole = not any(each.has_whole_rows for each in self._blocks.values())
        self._is_coded = is_whole and multiplies_codes(first, implementations[1])
        self._is_looped = (
            is_whole
            and not self._is_coded
            and first.device.type == "cpu"
            and self._dtype in (torch.float32, torch.bfloat16)
        )
        self.is_widened = not self._is_coded and not self._is_looped
        self._packed: PackedExperts | None = None
        self._products: dict[str, list[GroupedLinear]] = {}
        # The scales, for the forms of products that cannot return them.
        self._scales: dict[str, Tensor] = {}

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, blocks in self._blocks.items():
            yield name, blocks
            yield f"{name}_scale", blocks.scale

    def pack(self, kept: list[tuple[str, str]]) -> PackedExperts:
        for name in {name for name, _ in kept} & set(dict(self.parameters())):
            parameter = dict(self.parameters())[name]
            parameter.allocate().copy_(self.plain(name))
        gate_up, down = (self._take(name) for name in _NAMES)
        if self._is_coded:
            self._packed = self._pack_codes(gate_up, down)
        elif self._is_looped:
            self._products = {"gate_up": self._pack_each(gate_up), "down": self._pack_each(down)}
            self._packed = LoopedExperts(self._products["gate_up"], self._products["down"])
        else:
            numbers = self._widened("gate_up", gate_up), self._widened("down", down)
            if self._packed is None:
                self._packed = pack_experts(*numbers, *self._implementations)
            else:
                self._packed.repack(*numbers)
        return self._packed

    def _take(self, name: str) -> Grouped:
        """Remove the filled blocks, and return their codes in our order of rows."""
        blocks = self._blocks[name]
        scales = blocks.scale.allocate()
        codes = to_codes(blocks.allocate())
        blocks.tensor = blocks.scale.tensor = None
        if not self._is_coded:
            self._scales[name] = scales
        return Grouped("mxfp4", codes, scales, None, MXFP4_GROUP)

    def _pack_codes(self, gate_up: Grouped, down: Grouped) -> PackedExperts:
        from kernels.experts.triton_coded import CodedExperts, pack

        is_invariant = self._implementations[1] == "triton_invariant"
        made = pack(gate_up, down, self._num_experts, is_invariant=is_invariant)
        assert made is not None, "kernels have groups of 32"
        if isinstance(self._packed, CodedExperts) and self._packed.replace(made):
            return self._packed
        return made

    def _pack_each(self, all_rows: Grouped) -> list[GroupedLinear]:
        found = []
        for codes, scales in zip(
            all_rows.codes.chunk(self._num_experts),
            all_rows.scales.chunk(self._num_experts),
            strict=True,
        ):
            one = Grouped("mxfp4", codes, scales, None, MXFP4_GROUP)
            product = pack_linear(one, None, self._dtype)
            assert product is not None, "the reference takes every form"
            found.append(product)
        return found

    def _widened(self, name: str, rows: Grouped) -> Tensor:
        mine = self._blocks[name].mine(rows.numbers()).to(self._dtype)
        return mine.unflatten(0, (self._num_experts, -1)).contiguous()

    def _present(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the packed codes of the parameter `name`, one per byte, and its scales."""
        assert self._packed is not None, "the weights are not loaded"
        which = cast("Literal['gate_up', 'down']", name)
        if self._is_coded:
            coded = cast("CodedExperts", self._packed)
            found = [coded.grouped(which, expert) for expert in range(self._num_experts)]
            return torch.cat([each.codes for each in found]), torch.cat([e.scales for e in found])
        scales = self._scales[name]
        if self._is_looped:
            return torch.cat([each.codes() for each in self._products[name]]), scales
        numbers = self._packed.unpack()[_NAMES.index(which)].flatten(0, 1).float()
        shard, blocks = self._blocks[name].plain.shards[""], self._blocks[name]
        place = torch.arange(scales.shape[1] * MXFP4_GROUP, device=scales.device) // MXFP4_GROUP
        if not blocks.has_whole_rows:
            return code_e2m1(numbers / torch.exp2(scales.float() - 127)[:, place]), scales
        # The columns of other ranks are not on this rank, so their codes are returned as 0.
        codes = torch.zeros(len(numbers), len(place), dtype=torch.uint8, device=scales.device)
        mine = slice(shard.start, shard.start + shard.length)
        codes[:, mine] = code_e2m1(numbers / torch.exp2(scales.float() - 127)[:, place[mine]])
        return codes, scales

    def plain(self, name: str) -> Tensor:
        codes, scales = self._present(name.removesuffix("_scale"))
        return scales if name.endswith("_scale") else to_blocks(codes)

    def part(self, name: str, shard_name: str) -> Tensor:  # noqa: ARG002  # there is one
        parameter = dict(self.parameters())[name]
        assert isinstance(parameter, BytesParameter)
        return parameter.as_stored(self.plain(name))

    def values(self, name: str, shard_name: str) -> Tensor:
        if name.endswith("_scale"):
            return self.part(name, shard_name)
        blocks = self._blocks[name]
        rows = Grouped("mxfp4", *self._present(name), None, MXFP4_GROUP)
        return blocks.plain.stored(blocks.mine(rows.numbers()))

    def discard(self) -> None:
        for blocks in self._blocks.values():
            blocks.tensor = blocks.scale.tensor = None

    def release(self) -> None:
        self.discard()
        self._packed = None
        self._products.clear()
        self._scales.clear()
