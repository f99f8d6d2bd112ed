"""An RMS norm over all query heads together, and one over all key heads together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Output
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder, WeightShard


class JointNorm:
    """The norms of OLMo 2: one over all query heads and one over all key heads, before rotation.

    Each rank holds the weights of its own heads. Ranks add their sums of squares.
    """

    __slots__ = ("_eps", "_num_values", "_reduce", "_tp_size", "k_norm", "q_norm")

    def __init__(self, query: Output, key: Output, eps: float, context: BuildContext) -> None:
        """Allocate the weights of this rank's heads.

        Args:
            query: this rank's rows of q in the fused product of q, k and v.
            key: this rank's rows of k. The product has as many rows of v.
            eps: number that is added to the mean square.
            context: dtype, device and ranks.

        Raises:
            ValueError: there are several ranks and the context cannot sum over them.
        """
        self._eps, self._num_values, self._tp_size = eps, key.length, context.tp_size
        self._reduce = context.all_reduce
        if context.tp_size > 1 and self._reduce is None:
            raise ValueError("norms over the heads of several ranks need context.all_reduce")
        self.q_norm, self.k_norm = (
            RMSNorm(
                rows.size,
                eps,
                context,
                part=WeightShard((rows.size,), 0, 0, rows.start, rows.length),
            )
            for rows in (query, key)
        )

    def apply(self, qkv: Tensor) -> None:
        """Norm this rank's queries and keys in place.

        Args:
            qkv: `[num_tokens, q + k + v columns]`, float16, bfloat16 or float32.
        """
        norms = self.q_norm, self.k_norm
        sizes = [*(len(norm.weight) for norm in norms), self._num_values]
        parts = qkv.split(sizes, dim=1)[:2]
        if self._tp_size == 1 or self._reduce is None:
            for part, norm in zip(parts, norms, strict=True):
                part.copy_(norm.forward(part.contiguous()))
            return
        floats = [part.float() for part in parts]
        squares = self._reduce(torch.stack([each.square().sum(dim=1) for each in floats]))
        for part, values, total, norm in zip(parts, floats, squares, norms, strict=True):
            # Ranks that share a key head each add its squares to the sum, so the number of columns
            # also counts the head once per rank.
            mean = total / (values.shape[1] * self._tp_size)
            scale = torch.rsqrt(mean + self._eps).unsqueeze(1)
            part.copy_(values * scale * norm.weight)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.q_norm", self.q_norm
        yield f"{prefix}.k_norm", self.k_norm
