"""Matrices in codes of 4 or 8 bits on the device: their products, and what was stored of them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import gcd

import torch
from torch import Tensor

from kernels.experts import PackedExperts, pack_experts
from kernels.experts.reference import LoopedExperts
from kernels.fp8_linear import RoundedLinear
from kernels.group_linear import MIDDLE, Grouped, GroupedLinear
from kernels.group_linear import pack as pack_codes_for_products
from kernels.linear import PackedLinear
from kernels.linear import pack as pack_plain
from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored
from runtime.models.quantization.groups.front import GroupQuantization
from runtime.models.quantization.groups.group_parameters import FORMS, CodeParameter, SmallParameter
from runtime.models.quantization.groups.group_scheme import GroupScheme
from runtime.models.quantization.groups.layouts import pack_codes, scales_by_row, unpack_zeros
from runtime.models.quantization.method import DeviceMethod

logger = logging.getLogger(__name__)

_DTYPES = {"_scale": torch.float16, "_zero": torch.int32, "_order": torch.int32}
_DTYPES["_shape"] = torch.int64


class Device(DeviceMethod):
    """Keeps codes where kernels multiply by them; a GPU's experts are widened."""

    def __init__(self, quantization: Quantization) -> None:
        assert isinstance(quantization, GroupQuantization)
        self._quantization = quantization
        self._num_widened = 0

    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:  # noqa: ARG002
        return plain

    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        codes = self._codes("weight", plain, weights)
        if codes is None:
            return None
        keeps = plain.device.type == "cpu" or (
            self.implementation is None and plain.dtype in (torch.bfloat16, torch.float16)
        )
        self._num_widened += not keeps
        return GroupMatrix(codes, self.implementation, keeps=keeps)

    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        found = {}
        for name, parameter in plain.items():
            codes = self._codes(name, parameter, weights[name])
            if codes is None:
                codes = Codes(name, parameter, dict.fromkeys(parameter.shards), weights[name])
            found[name] = codes
        if not any(codes.has_codes for codes in found.values()):
            return None
        self._num_widened += sum(parameter.device.type != "cpu" for parameter in plain.values())
        return GroupExperts(found, mine, (self.implementation, self.experts_implementation))

    def _codes(
        self, name: str, plain: Parameter, weights: Mapping[str, WeightSpec]
    ) -> Codes | None:
        schemes = {shard: self._quantization.scheme(weight) for shard, weight in weights.items()}
        if len(plain.shape) != 2 or not any(schemes.values()):
            return None
        return Codes(name, plain, schemes, weights)

    def report(self) -> None:
        if self._num_widened:
            logger.info(
                "Widened to 16 bits while they load: %d parameters in codes (experts, or no kernel "
                "fits the type, or products must not vary)",
                self._num_widened,
            )


class Codes:
    """The stored tensors of one parameter's matrices, whatever multiplies by them.

    Attributes:
        code: what codes fill, and plain numbers of matrices that are stored so.
    """

    def __init__(
        self,
        name: str,
        plain: Parameter,
        schemes: Mapping[str, GroupScheme | None],
        weights: Mapping[str, WeightSpec],
    ) -> None:
        self._name = name
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for shard, scheme in schemes.items():
            for each in () if scheme is None else scheme.tensors(weights[shard].shape):
                if each.target:
                    shapes.setdefault(each.target, {})[shard] = each.shape
        self._small = {
            target: SmallParameter(of_target, _DTYPES[target], plain.device)
            for target, of_target in shapes.items()
        }
        self.code = CodeParameter(plain, schemes, self._small)
        # What belongs to the codes that are in use, by ending and shard.
        self._used: dict[str, dict[str, Tensor]] = {target: {} for target in self._small}

    @property
    def has_codes(self) -> bool:
        """Whether any of the matrices is in codes."""
        return bool(self._small)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield what a checkpoint fills; see `Matrix`."""
        yield self._name, self.code
        for target, parameter in self._small.items():
            yield self._name + target, parameter

    def take_small(self) -> None:
        """Make effective what was filled beside the codes."""
        for target, parameter in self._small.items():
            self._used[target].update(parameter.filled)
            parameter.filled.clear()

    def small(self, name: str, shard_name: str) -> Tensor:
        """What one tensor beside the codes filled, as it was stored."""
        return self._used[name.removeprefix(self._name)][shard_name]

    def grouped(self, shard_name: str, codes: Tensor) -> Grouped | None:
        """A rank's part of a matrix; `None` if its groups are scattered over the columns."""
        shard, scheme = self.code.shards[shard_name], self.code.schemes[shard_name]
        if scheme is None:
            return None
        group = scheme.group_of(shard.shape[1])
        start, length = (shard.start, shard.length) if shard.shard_dim == 1 else (0, shard.shape[1])
        scales, zeros = self._by_row(shard_name, scheme)
        order = None
        places = self._used.get("_order", {}).get(shard_name)
        if places is not None:
            usual = torch.arange(len(places), device=places.device) // group
            if not torch.equal(places.long(), usual):
                order = places.long().argsort(stable=True)
                if length != shard.shape[1] or not torch.equal(places.long()[order], usual):
                    return None
                codes = codes[:, order]
        fine = gcd(group, start, length) if length != shard.shape[1] else group
        at = (start + torch.arange(0, length, fine, device=scales.device)) // group
        return Grouped(
            FORMS[scheme.bits],
            codes,
            scales[:, at],
            None if zeros is None else zeros[:, at],
            fine,
            order,
        )

    def _by_row(self, shard_name: str, scheme: GroupScheme) -> tuple[Tensor, Tensor | None]:
        """Scales and codes of zero of this rank's rows; `None` where zeros are in the middle."""
        shard = self.code.shards[shard_name]
        scales = scales_by_row(self._used["_scale"][shard_name], scheme)
        zeros = None
        if scheme.has_zeros:
            zeros = unpack_zeros(self._used["_zero"][shard_name], scheme, shard.shape[0])
            if bool((zeros == MIDDLE[FORMS[scheme.bits]]).all()):
                zeros = None
        if shard.shard_dim == 0:
            scales = shard.local_part(scales)
            zeros = None if zeros is None else shard.local_part(zeros)
        return scales, zeros

    def _spread(self, shard_name: str) -> tuple[Tensor, Tensor]:
        """The scale and the code of zero of each number of this rank's part, float32."""
        shard, scheme = self.code.shards[shard_name], self.code.schemes[shard_name]
        assert scheme is not None, "plain numbers have no scales"
        places = self._used.get("_order", {}).get(shard_name)
        if places is None:
            places = torch.arange(shard.shape[1], device=self.code.device) // scheme.group_of(
                shard.shape[1]
            )
        if shard.shard_dim == 1:
            places = places.narrow(0, shard.start, shard.length)
        scales, zeros = self._by_row(shard_name, scheme)
        # Noise in the place of groups stays inside.
        places = places.long() % scales.shape[1]
        middle = float(MIDDLE[FORMS[scheme.bits]])
        spread = scales.float()[:, places]
        return spread, torch.full_like(spread, middle) if zeros is None else zeros.float()[
            :, places
        ]

    def numbers(self, shard_name: str, codes: Tensor) -> Tensor:
        """What this rank's part stands for, float32; plain numbers as they are."""
        if self.code.schemes[shard_name] is None:
            return codes.float()
        scales, zeros = self._spread(shard_name)
        return (codes.float() - zeros) * scales

    def codes_of(self, shard_name: str, numbers: Tensor) -> Tensor:
        """The codes that became `numbers`, of this rank's part; plain numbers as they are."""
        scheme = self.code.schemes[shard_name]
        if scheme is None:
            return numbers.to(self.code.dtype)
        scales, zeros = self._spread(shard_name)
        quotients = torch.where(scales == 0, 0.0, numbers.float() / scales)
        return (quotients + zeros).round().clamp(0, 2**scheme.bits - 1).to(torch.uint8)

    def as_stored(self, shard_name: str, codes: Tensor) -> Tensor:
        """This rank's codes in words, where its part has whole words; else one a byte."""
        scheme = self.code.schemes[shard_name]
        if scheme is None:
            return codes
        is_even = not any(size % (32 // scheme.bits) for size in codes.shape)
        # The last word of a row may be short in this layout.
        is_whole = scheme.layout == "packed" and codes.shape == self.code.shards[shard_name].shape
        if not is_even and not is_whole:
            return codes
        return pack_codes(codes, scheme)

    def discard(self) -> None:
        """Drop what was filled."""
        self.code.filled.clear()
        for parameter in self._small.values():
            parameter.filled.clear()


class Product:
    """The product of matrices one below the other, and the codes that it multiplies by."""

    def __init__(
        self, stored: Codes, shard_names: list[str], implementation: str | None, *, keeps: bool
    ) -> None:
        """Keep nothing yet.

        Args:
            stored: whose shards the matrices are.
            shard_names: from the first row down.
            implementation: of products of widened numbers.
            keeps: whether codes are kept, where kernels have their form.
        """
        self.stored, self._names = stored, shard_names
        self._implementation, self._keeps = implementation, keeps
        self.packed: PackedLinear | None = None
        self._order: Tensor | None = None

    def pack(self, bias: Tensor | None) -> PackedLinear:
        """Multiply by what was filled."""
        filled = [self.stored.code.filled.pop(name) for name in self._names]
        made: PackedLinear | None = self._pack_codes(filled, bias) if self._keeps else None
        if made is None:
            self._order = None
            numbers = torch.cat(
                [self.stored.numbers(*each) for each in zip(self._names, filled, strict=True)]
            )
            if numbers.device.type == "cpu":
                made = RoundedLinear([(numbers, None)], bias)
            else:
                numbers = numbers.to(self.stored.code.dtype)
                if self.packed is not None and not isinstance(self.packed, GroupedLinear):
                    self.packed.repack(numbers, bias)
                    return self.packed
                made = pack_plain(numbers, bias, self._implementation)
        elif isinstance(self.packed, GroupedLinear) and self.packed.replace(made):
            return self.packed
        self.packed = made
        return made

    def _pack_codes(self, filled: list[Tensor], bias: Tensor | None) -> GroupedLinear | None:
        parts = []
        for name, codes in zip(self._names, filled, strict=True):
            part = self.stored.grouped(name, codes)
            if part is None:
                return None
            parts.append(part)
        first = parts[0]
        group = gcd(*(part.group for part in parts))
        for part in parts:
            if part.form != first.form or (part.order is None) != (first.order is None):
                return None
            if part.order is not None and not torch.equal(part.order, first.order):  # type: ignore[arg-type]  # neither is None
                return None
        parts = [part.with_groups_of(group) for part in parts]
        zeros = None
        if any(part.zeros is not None for part in parts):
            middle = MIDDLE[first.form]
            zeros = torch.cat(
                [
                    torch.full(
                        part.scales.shape, middle, dtype=torch.uint8, device=part.codes.device
                    )
                    if part.zeros is None
                    else part.zeros
                    for part in parts
                ]
            )
        whole = Grouped(
            first.form,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            zeros,
            group,
            first.order,
        )
        self._order = first.order
        return pack_codes_for_products(whole, bias, self.stored.code.dtype)

    def codes(self, shard_name: str) -> Tensor:
        """This rank's codes of a matrix, one a byte, or its plain numbers."""
        first, count = self._rows(shard_name)
        assert self.packed is not None, "the weight is not loaded"
        if not isinstance(self.packed, GroupedLinear):
            part = self.packed.unpack().narrow(0, first, count)
            return self.stored.codes_of(shard_name, part)
        codes = self.packed.codes().narrow(0, first, count)
        if self._order is None:
            return codes
        return torch.empty_like(codes).index_copy_(1, self._order, codes)

    def _rows(self, shard_name: str) -> tuple[int, int]:
        first = 0
        for name in self._names:
            count = self.stored.code.shards[name].num_rows
            if name == shard_name:
                return first, count
            first += count
        raise KeyError(shard_name)


class _Reading(ABC):
    """What is read back of a store's parameters."""

    @abstractmethod
    def _codes(self, name: str) -> Codes:
        """Of the parameter of this name, or of what belongs to it."""

    @abstractmethod
    def _kept(self, name: str, shard_name: str) -> Tensor:
        """This rank's codes of a matrix, one a byte, or its plain numbers."""

    def plain(self, name: str) -> Tensor:
        """See `Matrix`: bytes, one shard after the other."""
        stored = self._codes(name)
        parameter = dict(stored.parameters())[name]
        if parameter is stored.code:
            parts = [self._kept(name, each) for each in stored.code.ordered()]
        else:
            parts = [stored.small(name, each) for each in parameter.shards]
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def part(self, name: str, shard_name: str) -> Tensor:
        """See `Matrix`."""
        stored = self._codes(name)
        if dict(stored.parameters())[name] is not stored.code:
            return stored.small(name, shard_name)
        if not stored.code.shards[shard_name].num_rows:
            return torch.empty(0, 0, dtype=torch.uint8)
        return stored.as_stored(shard_name, self._kept(name, shard_name))

    def values(self, name: str, shard_name: str) -> Tensor:
        """See `Matrix`."""
        stored = self._codes(name)
        if dict(stored.parameters())[name] is not stored.code:
            return stored.small(name, shard_name)
        shard = stored.code.shards[shard_name]
        if not shard.num_rows:
            return torch.empty(shard.local_shape)
        return stored.numbers(shard_name, self._kept(name, shard_name))


class GroupMatrix(_Reading, Matrix):
    """Codes of one or several projections, as one product."""

    def __init__(self, stored: Codes, implementation: str | None, *, keeps: bool) -> None:
        """Keep them; arguments as of `Product`."""
        self._stored = stored
        self._made = Product(stored, stored.code.ordered(), implementation, keeps=keeps)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._stored.parameters()

    def pack(self, kept: list[tuple[str, str]], bias: Tensor | None) -> PackedLinear:
        for shard_name in [shard for name, shard in kept if name == "weight"]:
            # Ahead of the scales, some of which may be new.
            self._stored.code.filled[shard_name] = self._made.codes(shard_name)
        self._stored.take_small()
        self.packed = self._made.pack(bias)
        return self.packed

    def discard(self) -> None:
        self._stored.discard()

    def _codes(self, name: str) -> Codes:  # noqa: ARG002  # there is one
        return self._stored

    def _kept(self, name: str, shard_name: str) -> Tensor:  # noqa: ARG002  # likewise
        return self._made.codes(shard_name)

    def release(self) -> None:
        self.discard()
        self.packed = self._made.packed = None


class GroupExperts(_Reading, ExpertsStore):
    """Codes of each expert: products of their own on a CPU, widened on a GPU."""

    def __init__(
        self,
        stored: Mapping[str, Codes],
        mine: range,
        implementations: tuple[str | None, str | None],
    ) -> None:
        self._all, self._mine, self._implementations = dict(stored), mine, implementations
        self._packed: PackedExperts | None = None
        self._on_cpu = stored["down"].code.device.type == "cpu"
        names: dict[str, list[list[str]]] = {
            "gate_up": [[f"{i}.gate", f"{i}.up"] for i in mine],
            "down": [[str(i)] for i in mine],
        }
        self._names = names
        self._products = {
            name: [Product(stored[name], shards, None, keeps=True) for shards in of_name]
            for name, of_name in names.items()
            if self._on_cpu
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
        if self._on_cpu:
            gate_up, down = ([each.pack(None) for each in self._products[n]] for n in self._all)
            self._packed = LoopedExperts(gate_up, down)
            return self._packed
        stacked = self._widened("gate_up"), self._widened("down")
        if self._packed is None:
            self._packed = pack_experts(*stacked, *self._implementations)
        else:
            self._packed.repack(*stacked)
        return self._packed

    def _widened(self, name: str) -> Tensor:
        """The filled matrices of all experts, `[experts, rows, columns]` in 16 bits."""
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
        if self._on_cpu:
            return self._products[name][expert].codes(shard_name)
        assert self._packed is not None, "the weights are not loaded"
        gate_up, down = self._packed.unpack_one(expert)
        numbers = down
        if name == "gate_up":
            gate, up = gate_up.chunk(2)
            numbers = gate if shard_name.endswith("gate") else up
        return self._all[name].codes_of(shard_name, numbers)

    def release(self) -> None:
        self.discard()
        self._packed = None
        for products in self._products.values():
            for product in products:
                product.packed = None
