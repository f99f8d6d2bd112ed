"""An RMS norm over groups of consecutive heads; several ranks may share a group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.norm import rms_norm
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightShard


class GroupRMSNorm:
    """The norm of Mamba 2's output: each group of heads is normed by itself.

    Attributes:
        norm: the holder of this rank's weights.
    """

    __slots__ = ("_eps", "_group", "_num_groups", "_ones", "_reduce", "_size", "norm")

    def __init__(self, size: int, num_groups: int, eps: float, context: BuildContext) -> None:
        """Allocate the weights of this rank's elements.

        Args:
            size: elements of all groups over all ranks.
            num_groups: number of groups over all ranks.
            eps: number that is added to the mean square.
            context: dtype, device and ranks.

        Raises:
            ValueError: ranks share a group and the context cannot sum over them.
        """
        ranks, length = context.tp_size, size // context.tp_size
        part = WeightShard((size,), 0, 0, context.tp_rank * length, length)
        self.norm = RMSNorm(size, eps, context, part=part)
        self._eps, self._size, self._num_groups = eps, size // num_groups, num_groups
        self._group = context.tp_rank * num_groups // ranks
        self._reduce = context.all_reduce if num_groups < ranks else None
        if num_groups < ranks and self._reduce is None:
            raise ValueError("norms over the heads of several ranks need context.all_reduce")
        self._ones = torch.ones(self._size, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's elements, `[num_tokens, length]`, as a new tensor."""
        if self._reduce is not None:
            return self._across_ranks(x, self._reduce)
        if x.shape[1] == self._size:
            return self.norm.forward(x)
        groups = rms_norm(x.view(-1, self._size), self._ones, self._eps)
        return groups.view(x.shape).mul_(self.norm.weight)

    def _across_ranks(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        values = x.float()
        squares = values.new_zeros(self._num_groups, len(x))
        squares[self._group] = values.square().sum(dim=1)
        mean = reduce(squares)[self._group] / self._size
        scale = torch.rsqrt(mean + self._eps).unsqueeze(1)
        return (values * scale).to(x.dtype).mul_(self.norm.weight)
