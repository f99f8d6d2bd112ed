"""Copies of pages: every implementation moves exactly the bytes of the pages."""

import pytest
import torch

from kernels.page_copy import PAGE_COPY

IMPLEMENTATIONS = [name for name in PAGE_COPY if PAGE_COPY.unavailable(name) is None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", [3, 20, 1040])
def test_pages_go_to_host_memory_and_back(name, row):
    torch.manual_seed(row)
    heads = (2, 1, 4)
    parts = [torch.randn(9, each, 2, row).to(DEVICE) for each in heads]
    parts[1] = parts[1].to(torch.bfloat16)
    parts[2] = parts[2].to(torch.float8_e4m3fn)
    before = [part.clone() for part in parts]
    size = sum(part[0].nbytes for part in parts)
    host = torch.full((6, size), 7, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    kernels = PAGE_COPY.load(name)
    pages, host_pages = (torch.tensor(each).to(DEVICE) for each in ([8, 1, 5], [2, 4, 1]))
    kernels.copy_pages(parts, pages, host, host_pages, to_host=True)
    back = torch.tensor([3, 8, 1]).to(DEVICE)
    kernels.copy_pages(parts, back, host, host_pages, to_host=False)
    for part, was in zip(parts, before, strict=True):
        expected = was.clone().view(torch.uint8)
        expected[[3, 8, 1]] = was.view(torch.uint8)[[8, 1, 5]]
        assert torch.equal(part.view(torch.uint8), expected)
    assert host[[0, 3, 5]].eq(7).all()
    assert not host[[1, 2, 4]].eq(7).all(dim=1).any()
