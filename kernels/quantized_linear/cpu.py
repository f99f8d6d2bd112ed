"""Products with stored forms in the C++ library: panels of 16 rows, whose bits are in planes.

One layout serves every number of tokens and every instruction set. `kernels/cpu/stored.h` describes
the layout, and `kernels/cpu/stored_linear.cpp` the products. Packed matrices have as many bytes as
stored ones, and up to 6% more where the scales of GGUF's K forms are packed to 6 bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.quantized_linear import FORMS, QuantizedLinear, StoredMatrix, find_form

_library = library()
_linear = _library.hr_stored_linear
_NUMBERS = {name: number for number, name in enumerate(FORMS)}
# Rows of a stored matrix side by side in a panel, `COLUMNS` of kernels/cpu/stored.h.
_PANEL_ROWS = 16
_ALIGNMENT = 64


def dots_name() -> str:
    """Return the CPU instructions used for dot products of bytes, such as "AVX-512 VNNI"."""
    name: bytes = _library.hr_dots_name()
    return name.decode()


def _aligned(num_bytes: int) -> Tensor:
    """Return memory of `num_bytes` that begins at a cache line."""
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes]


class StoredLinear(QuantizedLinear):
    """A linear layer whose GGUF blocks are rearranged into panels of rows."""

    implementation = "cpu"

    def __init__(
        self, parts: Sequence[StoredMatrix], in_features: int, bias: Tensor | None
    ) -> None:
        super().__init__(parts, in_features)
        self.bias = None if bias is None else bias.float().contiguous()
        self._panels = []
        for form, rows in self.forms:
            panel_bytes: int = _library.hr_stored_panel_bytes(_NUMBERS[form], in_features)
            self._panels.append(_aligned(-(-rows // _PANEL_ROWS) * panel_bytes))
        # The table that the library reads: one `Part` of stored_linear.cpp per matrix.
        self._table = torch.tensor(
            [
                (_NUMBERS[form], panels.data_ptr(), rows, first)
                for (form, rows), panels, first in zip(
                    self.forms, self._panels, self._first_rows(), strict=True
                )
            ],
            dtype=torch.int64,
        )
        self._table_address = self._table.data_ptr()
        self.repack_stored(parts)

    def _first_rows(self) -> Iterator[int]:
        first = 0
        for _, rows in self.forms:
            yield first
            first += rows

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return sum(panels.nbytes for panels in self._panels) + bias

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        self.write(x, out)
        return out

    def write(self, x: Tensor, out: Tensor) -> None:
        assert x.is_contiguous()
        assert x.dtype in DTYPES
        tokens, in_features = x.shape
        assert in_features == self.in_features
        assert out.is_contiguous()
        assert out.dtype is x.dtype
        assert out.shape == (tokens, self.out_features)
        bias = self.bias
        _linear(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            self._table_address,
            len(self.forms),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            in_features,
            self.out_features,
            torch.get_num_threads(),
        )

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        ids = ids.contiguous()
        _check_ids(ids, self.out_features)
        out = torch.empty(len(ids), self.in_features)
        for (form, rows), panels, first in zip(
            self.forms, self._panels, self._first_rows(), strict=True
        ):
            _library.hr_stored_rows(
                _NUMBERS[form],
                panels.data_ptr(),
                first,
                rows,
                ids.data_ptr(),
                out.data_ptr(),
                len(ids),
                self.in_features,
                torch.get_num_threads(),
            )
        return out.to(dtype)

    def stored(self) -> list[StoredMatrix]:
        parts = []
        for (form, rows), panels in zip(self.forms, self._panels, strict=True):
            row_bytes = find_form(form).row_bytes(self.in_features)
            data = torch.empty(rows, row_bytes, dtype=torch.uint8)
            _library.hr_stored_unpack(
                _NUMBERS[form],
                panels.data_ptr(),
                data.data_ptr(),
                self.in_features,
                rows,
                torch.get_num_threads(),
            )
            parts.append(StoredMatrix(form, data))
        return parts

    def repack_stored(self, parts: Sequence[StoredMatrix]) -> None:
        self.check_same(parts)
        for part, panels in zip(parts, self._panels, strict=True):
            data = part.data.contiguous()
            _library.hr_stored_pack(
                _NUMBERS[part.form],
                data.data_ptr(),
                panels.data_ptr(),
                self.in_features,
                part.out_features,
                torch.get_num_threads(),
            )


def pack(parts: Sequence[StoredMatrix], in_features: int, bias: Tensor | None) -> StoredLinear:
    """Return a linear layer packed in panels; see `kernels.quantized_linear.pack`."""
    return StoredLinear(parts, in_features, bias)


def _check_ids(ids: Tensor, num_rows: int) -> None:
    """Refuse ids outside `[0, num_rows)`.

    numpy reads them, because a recorded step (`kernels.cpu.recording`) cannot repeat a branch on
    the values of a tensor. In such a step the library skips ids that are out of range.

    Raises:
        IndexError: an id is out of range.
    """
    found = ids.numpy()
    if len(found) and (found.min() < 0 or found.max() >= num_rows):
        raise IndexError(f"row ids outside [0, {num_rows})")


def look_up(stored: StoredMatrix, in_features: int, ids: Tensor) -> Tensor:
    """Return rows of a matrix that is not packed; see `kernels.quantized_linear.look_up`."""
    ids = ids.contiguous()
    _check_ids(ids, stored.out_features)
    assert stored.data.is_contiguous()
    out = torch.empty(len(ids), in_features)
    _library.hr_stored_look_up(
        _NUMBERS[stored.form],
        stored.data.data_ptr(),
        stored.out_features,
        ids.data_ptr(),
        out.data_ptr(),
        len(ids),
        in_features,
        torch.get_num_threads(),
    )
    return out
