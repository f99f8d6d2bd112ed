"""Linear layers with quantized weights (codes) on a CPU, whose kernels take blocks of 32 numbers.

The blocks have GGUF's types. `q4_0` has a scale and codes around 8, `q4_1` a scale and a minimum,
`q8_0` and `mxfp4` a scale. Scales are float16, except those of `mxfp4`. A product rounds each row
of activations to 8 bits in blocks of 32, as described in `kernels.quantized_linear`.
"""

import torch
from torch import Tensor

from kernels.cpu.library import unavailable
from kernels.group_linear import MIDDLE, Grouped, GroupedLinear
from kernels.linear import PackedLinear
from kernels.quantized_linear import QuantizedLinear, StoredMatrix
from kernels.quantized_linear import pack as pack_stored

_BLOCK = 32


def pack(weight: Grouped, bias: Tensor | None, dtype: torch.dtype) -> "BlocksLinear | None":
    """Return a linear layer whose codes are packed in blocks; `None` if blocks cannot hold them.

    See `kernels.group_linear.pack`.

    Blocks hold the numbers exactly, except for minima (`q4_1`), which are rounded to float16. This
    error is less than a 200th of the distance between two codes.
    """
    if dtype not in (torch.float32, torch.bfloat16) or unavailable() is not None:
        return None
    if weight.columns % _BLOCK or (weight.group % _BLOCK and weight.group < weight.columns):
        return None
    stored = _blocks(weight)
    return None if stored is None else BlocksLinear(stored, weight.columns, bias, weight.order)


def _blocks(weight: Grouped) -> StoredMatrix | None:
    rows, count = weight.rows, weight.columns // _BLOCK
    place = torch.arange(count) * _BLOCK // weight.group
    codes = weight.codes.view(rows, count, _BLOCK)
    if weight.form == "mxfp4":
        head = [weight.scales[:, place, None]]
    else:
        halves = weight.scales.half()
        if not torch.equal(halves.float(), weight.scales.float()):
            return None
        head = [halves[:, place, None].view(torch.uint8)]
    if weight.form == "int8":
        if weight.zeros is not None and bool((weight.zeros != MIDDLE["int8"]).any()):
            return None
        return StoredMatrix("q8_0", torch.cat([*head, codes ^ 128], -1).view(rows, -1))
    form = "mxfp4" if weight.form == "mxfp4" else "q4_0"
    if weight.zeros is not None:
        form = "q4_1"
        least = (-weight.zeros.float() * weight.scales.float()).half()
        head.append(least[:, place, None].view(torch.uint8))
    packed = codes[..., : _BLOCK // 2] | codes[..., _BLOCK // 2 :] << 4
    return StoredMatrix(form, torch.cat([*head, packed], -1).view(rows, -1))


class BlocksLinear(GroupedLinear):
    """A linear layer whose quantized weight is stored in blocks of 32 numbers.

    The order of the weight's columns may differ from that of the input.
    """

    implementation = "cpu"

    def __init__(
        self, stored: StoredMatrix, columns: int, bias: Tensor | None, order: Tensor | None
    ) -> None:
        """Pack the blocks.

        Args:
            stored: the blocks.
            columns: number of the weight's columns.
            bias: `[rows]`, or `None`.
            order: `[columns]` int64: column `i` of the blocks multiplies column `order[i]` of the
                input. `None` if the columns are in their original order.
        """
        super().__init__(columns, stored.out_features)
        self._order = order
        self._product: QuantizedLinear = pack_stored([stored], columns, bias)

    @property
    def size_bytes(self) -> int:
        return self._product.size_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x if self._order is None else x.index_select(1, self._order))

    def unpack(self) -> Tensor:
        """Return the float32 numbers that the blocks represent."""
        found = self._product.unpack()
        if self._order is None:
            return found
        return torch.empty_like(found).index_copy_(1, self._order, found)

    def codes(self) -> Tensor:
        (stored,) = self._product.stored()
        blocks = stored.data.view(self.out_features, self.in_features // _BLOCK, -1)
        if stored.form == "q8_0":
            return (blocks[..., -_BLOCK:] ^ 128).reshape(self.out_features, -1)
        packed = blocks[..., -_BLOCK // 2 :]
        return torch.cat([packed & 15, packed >> 4], -1).reshape(self.out_features, -1)

    def replace(self, other: PackedLinear) -> bool:  # noqa: ARG002  # a CPU has no graphs
        return False
