"""The scales of keys and values that a checkpoint stores for a KV cache of 8-bit floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, whole


class _ScaleParameter(Parameter):
    """A scale: one number, which tools store with shape `[1]` or `[]`."""

    __slots__ = ()

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        is_one = spec.has_shape(tuple(tensor.shape))
        return super().problem(spec, tensor.reshape(spec.shape) if is_one else tensor)


class KvScales(WeightHolder):
    """The scales of one layer's keys and values, applied to attention's input and output.

    Keys are divided by their scale, and queries are multiplied by it. Values are divided by their
    scale, and attention's output is multiplied by it. So kernels and caches need no scales. Scales
    are rounded up to powers of two. Products with powers of two are exact, and an 8-bit float has
    the same precision at every scale.
    """

    def __init__(self, sizes: tuple[int, int, int], has_norms: bool, context: BuildContext) -> None:
        """Allocate the scales and the factors that are computed from them.

        Args:
            sizes: this rank's columns of queries, keys and values.
            has_norms: whether queries and keys pass norms after their product. Then the scale of
                keys is not applied, because the norm bounds the keys.
            context: dtype and device. Scales are used if `kv_cache_dtype` is an 8-bit float.
        """
        self._sizes, self._has_norms = sizes, has_norms
        self._is_used = context.kv_cache_dtype.startswith("fp8")
        self._parameters = {
            name: _ScaleParameter((1,), whole((1,)), torch.float32, context.device)
            for name in ("k", "v")
        }
        for parameter in self._parameters.values():
            parameter.allocate().fill_(1.0)
        # These tensors are written in place, because CUDA graphs hold their addresses.
        self._factors = torch.ones(sum(sizes), dtype=context.dtype, device=context.device)
        self._factor = torch.ones(1, dtype=context.dtype, device=context.device)

    def scale(self, qkv: Tensor) -> Tensor:
        """Apply the scales to `qkv`, this rank's queries, keys and values, in place.

        Return `qkv`.
        """
        return qkv.mul_(self._factors) if self._is_used else qkv

    def unscale(self, attended: Tensor) -> Tensor:
        """Return attention's output times the scale of the values."""
        return attended * self._factor if self._is_used else attended

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:  # noqa: ARG002  # filled in place
        """Compute the factors of queries, keys and values from the loaded scales."""
        keys, values = (_power(self.plain(name)) for name in ("k", "v"))
        if self._has_norms:
            keys = torch.ones_like(keys)
        columns = zip(self._sizes, (keys, 1 / keys, 1 / values), strict=True)
        self._factors.copy_(torch.cat([factor.expand(size) for size, factor in columns]))
        self._factor.copy_(values)

    def discard(self) -> None:
        """Do nothing: the loader fills each scale in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Do nothing: the scales are too small to be worth releasing."""

    @property
    def size_bytes(self) -> int:
        return self._factors.nbytes + self._factor.nbytes


def _power(scale: Tensor) -> Tensor:
    """Return the next power of two that is not below `scale`, between 2**-14 and 2**14.

    Returns 1 for a number that is not a scale, such as -1, which tools store for "none".
    """
    is_scale = scale.isfinite() & (scale > 0)
    usual = torch.where(is_scale, scale, 1.0).clamp(2.0**-14, 2.0**14)
    return torch.exp2(usual.log2().ceil())
