"""Copies whole pages between the KV cache and host memory."""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["PAGE_COPY", "PageCopyKernels", "copy_pages"]


class PageCopyKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def copy_pages(
        self,
        parts: Sequence[Tensor],
        pages: Tensor,
        host: Tensor,
        host_pages: Tensor,
        *,
        to_host: bool,
    ) -> None:
        """Copy pages to or from host memory; see `kernels.page_copy.copy_pages`."""


PAGE_COPY: Table[PageCopyKernels] = Table(
    "page copy",
    {
        "reference": Entry("kernels.page_copy.reference", invariant=True),
        "triton": Entry(
            "kernels.page_copy.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> PageCopyKernels:
    return PAGE_COPY.choose(device_type).kernels


def copy_pages(
    parts: Sequence[Tensor], pages: Tensor, host: Tensor, host_pages: Tensor, *, to_host: bool
) -> None:
    """Copy pages from the KV cache to host memory, or back.

    A host page holds one page of each part, one after the other.

    Args:
        parts: keys or values of layers, `[num_pages, ...]` each, contiguous, of any dtype.
        pages: `[n]` int64, on the device of the parts: the pages that are read or written.
        host: `[num_host_pages, bytes of a page in all parts]` uint8, contiguous. For a GPU, the
            memory is page-locked and mapped, so the kernel reads and writes it directly.
        host_pages: `[n]` int64, on the device of the parts: the host page for each of `pages`.
        to_host: whether pages are copied to host memory. No page may be written twice.
    """
    kernels = _kernels(pages.device.type)
    kernels.copy_pages(parts, pages, host, host_pages, to_host=to_host)
