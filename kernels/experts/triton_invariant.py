"""Experts in Triton whose rows get the same bits in every batch.

One tile is used for any number of tokens. An element of a product is one chain of matrix
instructions over the columns of the weight, of the same shape in every batch. A token's experts are
summed in the order in which they were chosen.
"""

from torch import Tensor

from kernels.experts import PackedExperts
from kernels.experts.triton import TritonExperts


def pack_experts(gate_up: Tensor, down: Tensor, linear: str | None) -> PackedExperts:  # noqa: ARG001
    """Pack the experts of a layer; see `kernels.experts.pack_experts`."""
    return TritonExperts(gate_up, down, is_invariant=True)
