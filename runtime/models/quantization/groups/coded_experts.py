"""Experts whose matrices are quantized to 4-bit or 8-bit integers (codes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from kernels.experts import PackedExperts, pack_experts
from kernels.experts.reference import LoopedExperts
from kernels.group_linear import Grouped
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.parameter import Parameter
from runtime.models.quantization.groups.codes import Codes, Reading
from runtime.models.quantization.groups.products import Product, joined, other_form
from runtime.models.quantization.method import multiplies_codes

if TYPE_CHECKING:
    from kernels.experts.triton_coded import CodedExperts


class GroupExperts(Reading, ExpertsStore):
    """The quantized weights (codes) of a layer's experts.

    A GPU multiplies by the codes of all experts in grouped products. A CPU has a product for each
    expert. If no kernel supports the codes, they are converted to 16-bit floats ("widened").
    """

    def __init__(
        self,
        stored: Mapping[str, Codes],
        mine: range,
        implementations: tuple[str | None, str | None],
        widened: Callable[[], None],
    ) -> None:
        """Choose how the experts are computed; memory is taken only by `pack`.

        Args:
            stored: the stored tensors by name, `gate_up` and `down`.
            mine: the experts on this rank.
            implementations: names of the linear and the experts implementation for widened
                matrices; `None` for the fastest on the device.
            widened: called if no kernel supports the form of the codes.
        """
        self._all, self._mine, self._implementations = dict(stored), mine, implementations
        self._packed: PackedExperts | None = None
        self._tell_widened = widened
        code = stored["down"].code
        self._keeps = multiplies_codes(code, implementations[1])
        self._is_looped = code.device.type == "cpu" and not self._keeps
        self._names: dict[str, list[list[str]]] = {
            "gate_up": [[f"{i}.gate", f"{i}.up"] for i in mine],
            "down": [[str(i)] for i in mine],
        }
        self._products = {
            name: [Product(stored[name], shards, None, keeps=True) for shards in of_name]
            for name, of_name in self._names.items()
            if self._is_looped
        }

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for codes in self._all.values():
            yield from codes.parameters()

    def pack(self, kept: list[tuple[str, str]]) -> PackedExperts:
        for name, shard_name in kept:
            if name in self._all and self._all[name].code.shards[shard_name].num_rows:
                self._all[name].code.filled[shard_name] = self._kept(name, shard_name)
        for codes in self._all.values():
            codes.take_small()
        if self._is_looped:
            gate_up, down = ([each.pack(None) for each in self._products[n]] for n in self._all)
            self._packed = LoopedExperts(gate_up, down)
        elif self._keeps:
            self._packed = self._pack_codes()
        else:
            self._packed = self._pack_widened()
        return self._packed

    def _pack_codes(self) -> PackedExperts:
        from kernels.experts.triton_coded import CodedExperts, pack

        gate_up, down = self._joined("gate_up"), self._joined("down")
        made = None
        if gate_up is not None and down is not None:
            is_invariant = self._implementations[1] == "triton_invariant"
            made = pack(gate_up, down, len(self._mine), is_invariant=is_invariant)
        if made is None:
            if self._packed is not None:
                raise other_form()
            self._keeps = False
            self._tell_widened()
            return self._pack_widened()
        for codes in self._all.values():
            codes.code.filled.clear()
        if self._packed is None:
            return made
        # CUDA graphs hold the addresses of the codes in use. The error undoes the update.
        assert isinstance(self._packed, CodedExperts)
        if not self._packed.replace(made):
            raise other_form()
        return self._packed

    def _joined(self, name: str) -> Grouped | None:
        """Return the filled codes of all experts, stacked along the rows.

        `None` if their formats differ, or an expert has no codes.
        """
        stored = self._all[name]
        filled = stored.code.filled
        return joined(
            [stored.grouped(each, filled[each]) for shards in self._names[name] for each in shards]
        )

    def _pack_widened(self) -> PackedExperts:
        stacked = self._widened("gate_up"), self._widened("down")
        if self._packed is None:
            return pack_experts(*stacked, *self._implementations)
        self._packed.repack(*stacked)
        return self._packed

    def _widened(self, name: str) -> Tensor:
        """Return the filled matrices of all experts, `[experts, rows, columns]` in 16 bits."""
        stored = self._all[name]
        taken = [
            torch.cat([stored.numbers(each, stored.code.filled.pop(each)) for each in shards])
            .to(stored.code.dtype)
            for shards in self._names[name]
        ]  # fmt: skip
        return torch.stack(taken)

    def discard(self) -> None:
        for codes in self._all.values():
            codes.discard()

    def _codes(self, name: str) -> Codes:
        return self._all["gate_up" if name.startswith("gate_up") else "down"]

    def _kept(self, name: str, shard_name: str) -> Tensor:
        expert = int(shard_name.partition(".")[0]) - self._mine.start
        if self._is_looped:
            return self._products[name][expert].codes(shard_name)
        assert self._packed is not None, "the weights are not loaded"
        if self._keeps:
            which = cast("Literal['gate_up', 'down']", name)
            codes = cast("CodedExperts", self._packed).grouped(which, expert).codes
            return _half(codes, shard_name)
        numbers = self._packed.unpack_one(expert)[name == "down"]
        return self._all[name].codes_of(shard_name, _half(numbers, shard_name))

    def release(self) -> None:
        self.discard()
        self._packed = None
        for products in self._products.values():
            for product in products:
                product.packed = None


def _half(rows: Tensor, shard_name: str) -> Tensor:
    """Return the rows of one shard (`gate`, `up` or all of `down`) of an expert's matrix."""
    if not shard_name.endswith(("gate", "up")):
        return rows
    gate, up = rows.chunk(2)
    return gate if shard_name.endswith("gate") else up
