"""Matrices in E4M3 or int8 on the device: their products, and access to the stored tensors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from kernels.experts import PackedExperts, pack_experts
from kernels.experts.reference import LoopedExperts
from kernels.fp8_linear import BLOCK_COLUMNS, IntegerLinear, RoundedLinear, unavailable
from kernels.linear import PackedLinear
from kernels.linear import pack as pack_plain
from kernels.rounding import Rounding, to_codes
from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored
from runtime.models.quantization.fp8.front import Fp8Quantization
from runtime.models.quantization.fp8.parameters import CODES, CodeParameter, ScaleParameter
from runtime.models.quantization.fp8.scheme import Fp8Scheme
from runtime.models.quantization.method import DeviceMethod, multiplies_codes

logger = logging.getLogger(__name__)


class Device(DeviceMethod):
    """Stores matrices quantized to 8 bits (codes), in the form that the device can multiply.

    A CPU multiplies in float32 and rounds activations. A GPU multiplies by the codes if its kernels
    support the scheme. Otherwise it converts them to 16 bits while they load ("widens" them).
    """

    def __init__(self, quantization: Quantization) -> None:
        assert isinstance(quantization, Fp8Quantization)
        self._quantization = quantization
        self._num_widened = 0

    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:  # noqa: ARG002
        return plain

    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        codes = self._codes("weight", plain, weights)
        if codes is None:
            return None
        multiplies = self.implementation is None and codes.fit_kernels()
        self._num_widened += plain.device.type != "cpu" and not multiplies
        return Fp8Matrix(codes, self.implementation, multiplies=multiplies)

    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        found = {}
        for name, parameter in plain.items():
            codes = self._codes(name, parameter, weights[name])
            if codes is None:
                # Either all experts' matrices are in E4M3 or none, because one implementation
                # computes both products.
                codes = Codes(name, parameter, dict.fromkeys(parameter.shards), {})
            found[name] = codes
        if not any(codes.has_codes for codes in found.values()):
            return None
        multiplies = (
            multiplies_codes(plain["down"], self.experts_implementation)
            and self.experts_implementation != "triton_invariant"
            and all(codes.have_kernels_form() for codes in found.values())
        )
        self._num_widened += sum(
            not multiplies and parameter.device.type != "cpu" for parameter in plain.values()
        )
        return Fp8Experts(
            found["gate_up"],
            found["down"],
            mine,
            (self.implementation, self.experts_implementation),
            multiplies=multiplies,
        )

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
                "Widened to 16 bits while they load: %d parameters in fp8 (no kernel fits the "
                "device, type or shape, or products must not vary)",
                self._num_widened,
            )


class Codes:
    """The tensors that a checkpoint stores for the matrices of one parameter: codes and scales.

    Attributes:
        code: the parameter that is filled with codes, or with numbers of matrices in 16 bits.
        scales, inputs: for each packed shard, the scales of the matrix and of its activations.
    """

    def __init__(
        self,
        name: str,
        plain: Parameter,
        schemes: Mapping[str, Fp8Scheme | None],
        weights: Mapping[str, WeightSpec],
    ) -> None:
        self._name = name
        coded = {shard: scheme for shard, scheme in schemes.items() if scheme is not None}
        shapes = {
            shard: scheme.scale_shape(weights[shard].shape) for shard, scheme in coded.items()
        }
        static = {shard: (1,) for shard, scheme in coded.items() if scheme.is_static}
        self._scale = ScaleParameter(shapes, plain.device)
        self._input = ScaleParameter(static, plain.device)
        self.code = CodeParameter(plain, schemes, self._scale)
        self.scales: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}

    @property
    def has_codes(self) -> bool:
        """Whether any of the matrices is stored in 8-bit codes."""
        return bool(self._scale.shards)

    def fit_kernels(self) -> bool:
        """Whether the device is a GPU whose kernels can multiply by the codes."""
        return self.code.device.type == "cuda" and self.have_kernels_form()

    def have_kernels_form(self) -> bool:
        """Whether kernels can multiply by codes of this form.

        They can if all matrices have the same scheme, its scales are supported, and sizes are
        multiples of 16.
        """
        code, schemes = self.code, set(self.code.schemes.values())
        if code.dtype is not torch.bfloat16:
            return False
        scheme = schemes.pop()
        if schemes or scheme is None or any(size % 16 for size in code.shape):
            return False
        if code.device.type == "cuda" and unavailable(CODES[scheme.codes]):
            return False
        if scheme.block[1] == 0:
            return scheme.block[0] <= 1 and not scheme.group
        starts = [shard.start for shard in code.shards.values() if shard.shard_dim == 1]
        return (
            scheme.block[1] == BLOCK_COLUMNS
            and scheme.group in (0, BLOCK_COLUMNS)
            and bool(scheme.group or not scheme.rounds)
            and not scheme.is_static
            and not any(start % BLOCK_COLUMNS for start in starts)
        )

    def take_codes(self, shard_names: list[str]) -> tuple[Tensor, Tensor]:
        """Remove the codes of these shards and return them with the scales of each row.

        Both have the layout of the kernels.
        """
        rows = []
        for name in shard_names:
            scales = self.code.spread(name, self.scales[name])
            has_blocks = self.code.blocks(name).columns
            rows.append(scales[:, ::BLOCK_COLUMNS] if has_blocks else scales[:, :1])
        codes = torch.cat([self.code.filled.pop(name) for name in shard_names])
        return codes, torch.cat(rows)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters that a checkpoint fills; see `Matrix`."""
        yield self._name, self.code
        if self._scale.shards:
            yield f"{self._name}_scale", self._scale
        if self._input.shards:
            yield f"{self._name}_input_scale", self._input

    def take_scales(self) -> None:
        """Use the newly filled scales from now on."""
        self.scales.update(self._scale.scales)
        self.inputs.update(self._input.scales)
        self._scale.scales.clear()
        self._input.scales.clear()

    def take(self, shard_name: str) -> Tensor:
        """Remove a shard's codes and return its numbers, float32 of the shard's `local_shape`.

        `take_scales` must be called first.
        """
        filled = self.code.filled.pop(shard_name)
        if self.code.schemes[shard_name] is None:
            return filled.float()
        return filled.float() * self.code.spread(shard_name, self.scales[shard_name])

    def rounding(self, shard_name: str) -> Rounding | None:
        """Return how activations are rounded for a shard's product; `None` if they are not."""
        scheme = self.code.schemes[shard_name]
        if scheme is None or not scheme.rounds:
            return None
        scale = self.inputs.get(shard_name)
        if scale is None or bool(scale.isnan()):
            # The weights were given as floats, so there is no scale of activations from a
            # checkpoint.
            return Rounding(scheme.group, None, CODES[scheme.codes])
        return Rounding(scheme.group, scale[0], CODES[scheme.codes])

    def common_rounding(self, shard_names: list[str]) -> Rounding | None:
        """Return how activations are rounded once for the joint product of several shards.

        If the shards have different static scales, each token gets a scale of its own, which is
        finer. `None` means that activations are not rounded.
        """
        roundings = [self.rounding(name) for name in shard_names]
        rounding = roundings[0]
        if rounding is None or rounding.scale is None:
            return rounding
        scales = {None if each is None else float(each.scale or 0) for each in roundings}
        return rounding if len(scales) == 1 else replace(rounding, scale=None)

    def stored(self, shard_name: str, numbers: Tensor) -> Tensor:
        """Return the codes on this rank that represent `numbers`; plain numbers are only cast."""
        scheme = self.code.schemes[shard_name]
        if scheme is None:
            return numbers.to(self.code.dtype)
        scales = self.code.spread(shard_name, self.scales[shard_name])
        quotients = torch.where(scales == 0, 0.0, numbers.float() / scales)
        codes = CODES[scheme.codes]
        if codes is torch.int8:
            # Checkpoints use codes from -128; activations are rounded to codes from -127.
            return quotients.round().clamp(-128, 127).to(codes)
        return to_codes(quotients, codes)

    def scale_part(self, name: str, shard_name: str) -> Tensor:
        """Return the scales that one stored tensor filled; NaN for scales that were not filled."""
        parameter = dict(self.parameters())[name]
        found = (self.inputs if parameter is self._input else self.scales).get(shard_name)
        if found is None:
            found = torch.full(parameter.shards[shard_name].shape, torch.nan)
        return found

    def discard(self) -> None:
        """Drop the tensors that were filled but not packed."""
        self.code.filled.clear()
        self._scale.scales.clear()
        self._input.scales.clear()


class _Reading(ABC):
    """Restores the stored tensors (codes and scales) from the packed matrices; a base class."""

    @abstractmethod
    def _codes(self, name: str) -> Codes:
        """Return the codes that belong to a parameter, given its name or the name of its scales."""

    @abstractmethod
    def _numbers(self, name: str, shard_name: str) -> Tensor:
        """Return this rank's part of a matrix as the product uses it."""

    def plain(self, name: str) -> Tensor:
        """Return the bytes of codes, or the scales, of all shards in order; see `Matrix.plain`."""
        codes = self._codes(name)
        parameter = dict(codes.parameters())[name]
        if parameter is not codes.code:
            parts = [codes.scale_part(name, shard).flatten() for shard in parameter.shards]
            return torch.cat([part.to(parameter.device) for part in parts])
        here = codes.code.ordered()
        return torch.cat(
            [self.part(name, s).contiguous().view(torch.uint8).flatten() for s in here]
        )

    def part(self, name: str, shard_name: str) -> Tensor:
        """Return the codes or the scales of one shard; see `Matrix.part`."""
        codes = self._codes(name)
        if dict(codes.parameters())[name] is not codes.code:
            return codes.scale_part(name, shard_name)
        if not codes.code.shards[shard_name].num_rows:
            return torch.empty(0, 0)
        return codes.stored(shard_name, self._numbers(name, shard_name))

    def values(self, name: str, shard_name: str) -> Tensor:
        """Return the numbers of one shard, or its scales; see `Matrix.values`."""
        codes = self._codes(name)
        if dict(codes.parameters())[name] is not codes.code:
            return codes.scale_part(name, shard_name)
        shard = codes.code.shards[shard_name]
        return self._numbers(name, shard_name) if shard.num_rows else torch.empty(shard.local_shape)


def _pack(codes: Codes, shard_names: list[str], bias: Tensor | None) -> PackedLinear:
    """Pack filled matrices as one product of a CPU.

    Matrices whose activations are rounded in the same way are multiplied together.
    """

    def key(shard_name: str) -> tuple[object, ...]:
        rounding = codes.rounding(shard_name)
        if rounding is None:
            return ()
        return rounding.group, None if rounding.scale is None else float(rounding.scale)

    alike = [list(found) for _, found in groupby(shard_names, key)]
    roundings = [codes.rounding(names[0]) for names in alike]
    if all(each is not None and each.codes is torch.int8 for each in roundings):
        return IntegerLinear(
            [
                (*codes.take_codes(names), rounding)
                for names, rounding in zip(alike, roundings, strict=True)
                if rounding is not None
            ],
            bias,
        )
    parts = [
        (torch.cat([codes.take(name) for name in names]), rounding)
        for names, rounding in zip(alike, roundings, strict=True)
    ]
    return RoundedLinear(parts, bias)


class Fp8Matrix(_Reading, Matrix):
    """Quantized weights (codes, scales) of one or several projections, computed as one product."""

    def __init__(self, codes: Codes, implementation: str | None, *, multiplies: bool) -> None:
        """Keep the codes of the projections.

        Args:
            codes: codes of all projections.
            implementation: name of the linear implementation for matrices that are widened to 16
                bits; `None` for the fastest on the device.
            multiplies: whether a GPU's kernels multiply by the codes.
        """
        self._stored, self._implementation, self._multiplies = codes, implementation, multiplies
        self.packed: PackedLinear | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._stored.parameters()

    def pack(self, kept: list[tuple[str, str]], bias: Tensor | None) -> PackedLinear:
        codes = self._stored
        for shard_name in [shard for name, shard in kept if name == "weight"]:
            # This comes before the scales, some of which may be new.
            codes.code.filled[shard_name] = self.part("weight", shard_name)
        codes.take_scales()
        order = codes.code.ordered()
        if codes.code.device.type == "cpu":
            self.packed = _pack(codes, order, bias)
            return self.packed
        if self._multiplies:
            return self._pack_codes(bias)
        numbers = torch.cat([codes.take(name).to(codes.code.dtype) for name in order])
        if self.packed is None:
            self.packed = pack_plain(numbers, bias, self._implementation)
        else:
            self.packed.repack(numbers, bias)
        return self.packed

    def _pack_codes(self, bias: Tensor | None) -> PackedLinear:
        from kernels.fp8_linear.triton import Fp8Linear

        codes = self._stored
        order = codes.code.ordered()
        made = Fp8Linear(*codes.take_codes(order), codes.common_rounding(order), bias)
        if isinstance(self.packed, Fp8Linear) and self.packed.replace(made):
            return self.packed
        self.packed = made
        return made

    def discard(self) -> None:
        self._stored.discard()

    def _codes(self, name: str) -> Codes:  # noqa: ARG002  # there is one
        return self._stored

    def _numbers(self, name: str, shard_name: str) -> Tensor:  # noqa: ARG002
        assert self.packed is not None, "the weight is not loaded"
        shard = self._stored.code.shards[shard_name]
        return self.packed.unpack().narrow(0, shard.offset, shard.num_rows)

    def release(self) -> None:
        self.discard()
        self.packed = None


class Fp8Experts(_Reading, ExpertsStore):
    """Codes and scales of a layer's experts."""

    def __init__(
        self,
        gate_up: Codes,
        down: Codes,
        mine: range,
        implementations: tuple[str | None, str | None],
        *,
        multiplies: bool,
    ) -> None:
        """Keep the codes of the experts.

        Args:
            gate_up: codes of all gates and ups.
            down: codes of the other matrices.
            mine: the experts on this rank.
            implementations: names of the linear and the experts implementation for matrices that
                are widened to 16 bits; `None` for the fastest on the device.
            multiplies: whether a GPU's kernels multiply by the codes.
        """
        self._all = {"gate_up": gate_up, "down": down}
        self._mine, self._implementations, self._multiplies = mine, implementations, multiplies
        self._packed: PackedExperts | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for codes in self._all.values():
            yield from codes.parameters()

    def pack(self, kept: list[tuple[str, str]]) -> PackedExperts:
        for name, shard_name in kept:
            codes = self._codes(name)
            if name in self._all and codes.code.shards[shard_name].num_rows:
                codes.code.filled[shard_name] = self.part(name, shard_name)
        for codes in self._all.values():
            codes.take_scales()
        gate_up, down = self._all.values()
        if self._multiplies:
            return self._pack_codes()
        if gate_up.code.device.type == "cpu":
            self._packed = LoopedExperts(
                [_pack(gate_up, [f"{i}.gate", f"{i}.up"], None) for i in self._mine],
                [_pack(down, [str(i)], None) for i in self._mine],
            )
            return self._packed
        dtype = gate_up.code.dtype
        stacked = (
            torch.stack(
                [
                    torch.cat([gate_up.take(f"{i}.{each}").to(dtype) for each in ("gate", "up")])
                    for i in self._mine
                ]
            ),
            torch.stack([down.take(str(i)).to(dtype) for i in self._mine]),
        )
        if self._packed is None:
            self._packed = pack_experts(*stacked, *self._implementations)
        else:
            self._packed.repack(*stacked)
        return self._packed

    def _pack_codes(self) -> PackedExperts:
        from kernels.experts.triton_eight_bits import EightBitExperts, EightBitMatrix

        shards = {
            "gate_up": [f"{i}.{half}" for i in self._mine for half in ("gate", "up")],
            "down": [str(i) for i in self._mine],
        }
        gate_up, down = (
            EightBitMatrix(*codes.take_codes(shards[name]), codes.common_rounding(shards[name]))
            for name, codes in self._all.items()
        )
        made = EightBitExperts(gate_up, down, len(self._mine))
        if isinstance(self._packed, EightBitExperts) and self._packed.replace(made):
            return self._packed
        self._packed = made
        return made

    def discard(self) -> None:
        for codes in self._all.values():
            codes.discard()

    def _codes(self, name: str) -> Codes:
        return self._all["gate_up" if name.startswith("gate_up") else "down"]

    def _numbers(self, name: str, shard_name: str) -> Tensor:
        assert self._packed is not None, "the weights are not loaded"
        gate_up, down = self._packed.unpack_one(
            int(shard_name.partition(".")[0]) - self._mine.start
        )
        if name == "down":
            return down
        gate, up = gate_up.chunk(2)
        return gate if shard_name.endswith("gate") else up

    def release(self) -> None:
        self.discard()
        self._packed = None
