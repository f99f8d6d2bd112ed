"""Experts in Triton whose rows get the same bits in every batch: one tile for any number of tokens.

An element of a product is one chain of matrix instructions over the columns of the weight, of the
same shape in every batch; a token's experts are summed in the order of its choice.
"""

from torch import Tensor

from kernels.experts import PackedExperts
from kernels.experts.triton import TritonExperts


def pack_experts(gate_up: Tensor, down: Tensor, linear: str | None) -> PackedExperts:  # noqa: ARG001
    """See `kernels.experts.pack_experts`."""
    return TritonExperts(gate_up, down, is_invariant=True)
