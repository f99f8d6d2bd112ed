"""The tensors that a checkpoint stores for matrices quantized to 4-bit or 8-bit integers (codes).

Nothing here depends on a kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import gcd

import torch
from torch import Tensor

from kernels.group_linear import MIDDLE, Grouped
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.parameter import Parameter
from runtime.models.quantization.groups.group_parameters import FORMS, CodeParameter, SmallParameter
from runtime.models.quantization.groups.group_scheme import GroupScheme
from runtime.models.quantization.groups.layouts import pack_codes, scales_by_row, unpack_zeros

_DTYPES = {"_scale": torch.float16, "_zero": torch.int32, "_order": torch.int32}
_DTYPES["_shape"] = torch.int64


class Codes:
    """The stored tensors of one parameter's matrices: codes, scales, zero points and column orders.

    Attributes:
        code: the parameter that is filled with codes, or with plain numbers for matrices without
            codes.
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
        # The tensors that belong to the codes in use, by the ending of their names and by shard.
        self._used: dict[str, dict[str, Tensor]] = {target: {} for target in self._small}

    @property
    def has_codes(self) -> bool:
        """Whether any of the matrices is stored in codes."""
        return bool(self._small)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters that a checkpoint fills; see `Matrix`."""
        yield self._name, self.code
        for target, parameter in self._small.items():
            yield self._name + target, parameter

    def take_small(self) -> None:
        """Use the newly filled tensors other than codes, such as scales, from now on."""
        for target, parameter in self._small.items():
            self._used[target].update(parameter.filled)
            parameter.filled.clear()

    def small(self, name: str, shard_name: str) -> Tensor:
        """Return a tensor that belongs to the codes, such as scales, in its stored form."""
        return self._used[name.removeprefix(self._name)][shard_name]

    def grouped(self, shard_name: str, codes: Tensor) -> Grouped | None:
        """Return this rank's part of a matrix as codes in groups for the kernels.

        Args:
            shard_name: name of the matrix.
            codes: this rank's codes, `[rows, columns]` uint8.

        Returns:
            The codes; `None` for plain numbers. Also `None` if the columns of a group are scattered
            and the rank has only some columns.
        """
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
        """Return scales and zero points of this rank's rows.

        `None` takes the place of zero points if all of them are the middle code.
        """
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
        """Return the scale and the zero point of each number of this rank's part, in float32."""
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
        # Groups overwritten with noise (see `live_weights`) are brought into the range of groups.
        places = places.long() % scales.shape[1]
        middle = float(MIDDLE[FORMS[scheme.bits]])
        spread = scales.float()[:, places]
        return spread, torch.full_like(spread, middle) if zeros is None else zeros.float()[
            :, places
        ]

    def numbers(self, shard_name: str, codes: Tensor) -> Tensor:
        """Return the float32 numbers that `codes`, this rank's part, represent."""
        if self.code.schemes[shard_name] is None:
            return codes.float()
        scales, zeros = self._spread(shard_name)
        return (codes.float() - zeros) * scales

    def codes_of(self, shard_name: str, numbers: Tensor) -> Tensor:
        """Return this rank's codes that represent `numbers`; plain numbers are only cast."""
        scheme = self.code.schemes[shard_name]
        if scheme is None:
            return numbers.to(self.code.dtype)
        scales, zeros = self._spread(shard_name)
        quotients = torch.where(scales == 0, 0.0, numbers.float() / scales)
        return (quotients + zeros).round().clamp(0, 2**scheme.bits - 1).to(torch.uint8)

    def as_stored(self, shard_name: str, codes: Tensor) -> Tensor:
        """Return this rank's codes in packed words; one per byte if they do not fill words."""
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
        """Drop the tensors that were filled but not packed."""
        self.code.filled.clear()
        for parameter in self._small.values():
            parameter.filled.clear()


class Reading(ABC):
    """Restores stored tensors (codes, scales and others) from packed matrices; a base class."""

    @abstractmethod
    def _codes(self, name: str) -> Codes:
        """Return the stored tensors to which the parameter `name` belongs."""

    @abstractmethod
    def _kept(self, name: str, shard_name: str) -> Tensor:
        """Return this rank's codes of a matrix, one code per byte, or its plain numbers."""

    def plain(self, name: str) -> Tensor:
        """Return the bytes of all shards, concatenated in order; see `Matrix.plain`."""
        stored = self._codes(name)
        parameter = dict(stored.parameters())[name]
        if parameter is stored.code:
            parts = [self._kept(name, each) for each in stored.code.ordered()]
        else:
            parts = [stored.small(name, each) for each in parameter.shards]
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def part(self, name: str, shard_name: str) -> Tensor:
        """Return one shard in its stored form; see `Matrix.part`."""
        stored = self._codes(name)
        if dict(stored.parameters())[name] is not stored.code:
            return stored.small(name, shard_name)
        if not stored.code.shards[shard_name].num_rows:
            return torch.empty(0, 0, dtype=torch.uint8)
        return stored.as_stored(shard_name, self._kept(name, shard_name))

    def values(self, name: str, shard_name: str) -> Tensor:
        """Return the numbers of one shard; see `Matrix.values`."""
        stored = self._codes(name)
        if dict(stored.parameters())[name] is not stored.code:
            return stored.small(name, shard_name)
        shard = stored.code.shards[shard_name]
        if not shard.num_rows:
            return torch.empty(shard.local_shape)
        return stored.numbers(shard_name, self._kept(name, shard_name))
