"""The products of linear layers whose weights are quantized to 4-bit or 8-bit integers (codes)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from kernels.fp8_linear import RoundedLinear
from kernels.group_linear import MIDDLE, Grouped, GroupedLinear
from kernels.group_linear import pack as pack_codes_for_products
from kernels.linear import PackedLinear
from kernels.linear import pack as pack_plain
from runtime.errors import InvalidRequest
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter
from runtime.models.quantization.groups.codes import Codes, Reading


def joined(parts: Sequence[Grouped | None]) -> Grouped | None:
    """Stack the quantized integers (codes) of several matrices along the rows.

    Returns `None` if they cannot be one matrix: one of them has no codes, or their formats or
    column orders differ.
    """
    first = parts[0]
    if first is None:
        return None
    found: list[Grouped] = []
    for part in parts:
        if part is None or part.form != first.form:
            return None
        if part.order is not first.order and (
            part.order is None or first.order is None or not torch.equal(part.order, first.order)
        ):
            return None
        found.append(part)
    group = gcd(*(part.group for part in found))
    found = [part.with_groups_of(group) for part in found]
    zeros = None
    if any(part.zeros is not None for part in found):
        middle = MIDDLE[first.form]
        zeros = torch.cat(
            [
                torch.full_like(part.scales, middle, dtype=torch.uint8)
                if part.zeros is None
                else part.zeros
                for part in found
            ]
        )
    return Grouped(
        first.form,
        torch.cat([part.codes for part in found]),
        torch.cat([part.scales for part in found]),
        zeros,
        group,
        first.order,
    )


def other_form() -> InvalidRequest:
    """Return the error for an update of a live model with codes of another form.

    CUDA graphs hold the addresses of the codes in use, and kernels are compiled for their format.
    The error undoes the update.
    """
    return InvalidRequest(
        "Codes on a GPU are replaced by codes of the same form: bits, groups, type of scales, "
        "zeros and order of columns."
    )


class Product:
    """The product of an input with stacked matrices, which are quantized to integers (codes)."""

    def __init__(
        self, stored: Codes, shard_names: list[str], implementation: str | None, *, keeps: bool
    ) -> None:
        """Keep the arguments; memory is taken only by `pack`.

        Args:
            stored: the stored tensors of the matrices.
            shard_names: names of the matrices in the order of their rows.
            implementation: name of the linear implementation for matrices that are widened to
                floats; `None` for the fastest on the device.
            keeps: whether products use the codes if kernels support their form. Otherwise `pack`
                widens the matrices to floats.
        """
        self.stored, self._names = stored, shard_names
        self._implementation, self._keeps = implementation, keeps
        self.packed: PackedLinear | None = None
        self._order: Tensor | None = None

    def pack(self, bias: Tensor | None) -> PackedLinear:
        """Pack the tensors that were filled, and return the packed product.

        Raises:
            InvalidRequest: the form of the codes differs from that of a live model on a GPU.
        """
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
        if self.packed is not None and self.stored.code.device.type != "cpu":
            raise other_form()
        self.packed = made
        return made

    def _pack_codes(self, filled: list[Tensor], bias: Tensor | None) -> GroupedLinear | None:
        whole = joined(
            [self.stored.grouped(*each) for each in zip(self._names, filled, strict=True)]
        )
        if whole is None:
            return None
        self._order = whole.order
        return pack_codes_for_products(whole, bias, self.stored.code.dtype)

    def codes(self, shard_name: str) -> Tensor:
        """Return this rank's codes of a matrix, one code per byte, or its plain numbers."""
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


class GroupMatrix(Reading, Matrix):
    """Quantized weights (codes) of one or several projections, computed as one product."""

    def __init__(self, stored: Codes, implementation: str | None, *, keeps: bool) -> None:
        """Keep the arguments; memory is taken only by `pack`.

        Args:
            stored: the tensors of the projections as a checkpoint stores them.
            implementation: name of the linear implementation for matrices that are widened to
                floats; `None` for the fastest on the device.
            keeps: whether products use the codes if kernels support their form. Otherwise `pack`
                widens the matrices to floats.
        """
        self._stored = stored
        self._made = Product(stored, stored.code.ordered(), implementation, keeps=keeps)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._stored.parameters()

    def pack(self, kept: list[tuple[str, str]], bias: Tensor | None) -> PackedLinear:
        for shard_name in [shard for name, shard in kept if name == "weight"]:
            # The codes are read before the scales are replaced, because the kept codes belong to
            # the old scales.
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
