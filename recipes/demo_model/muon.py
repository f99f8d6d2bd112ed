"""Muon: momentum updates whose matrices are orthogonalised approximately before the step.

Source: Keller Jordan's Muon, with the quintic Newton-Schulz iteration. Matrices of one shape are
handled in one batch, because launching them one by one would cost more than the arithmetic.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each `[batch, rows, columns]` matrix towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon:
    """The optimizer of the hidden matrices."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float, decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.shape, []).append(parameter)
        self._groups = [
            (group, torch.zeros_like(torch.stack([p.detach() for p in group])))
            for group in groups.values()
        ]
        self._momentum, self._decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix from its gradient."""
        for group, buffer in self._groups:
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(gradient.lerp(buffer, self._momentum))
            rows, columns = group[0].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update.unbind(0), strict=True):
                parameter.mul_(1 - rate * self._decay)
                parameter.add_(change, alpha=-scale)
