"""Experts that a checkpoint stores as one tensor, and the conversion to our order of rows.

Our order is that of `kernels.experts.pack_experts`: output rows before input columns, and all rows
of gate before those of up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Output
from runtime.models.layers.parameter import Parameter, WeightShard


class StackedParameter(Parameter):
    """One matrix of all experts, or one bias of all experts, that one checkpoint tensor fills.

    Attributes:
        is_transposed: whether the checkpoint stores the input's dimension before the output's.
        is_interleaved: whether rows of gate and up alternate in the checkpoint.
    """

    __slots__ = ("is_interleaved", "is_transposed")

    def __init__(
        self,
        shard: WeightShard,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_transposed: bool,
        is_interleaved: bool,
    ) -> None:
        """Describe the tensor.

        Args:
            shard: the shard for the checkpoint's tensor, `[num_experts, ...]`.
            dtype: dtype of our tensor.
            device: device of our tensor.
            is_transposed: whether the checkpoint stores the input's dimension before the output's.
            is_interleaved: whether rows of gate and up alternate in the checkpoint.
        """
        count, *sizes = shard.local_shape
        if is_transposed:
            sizes.reverse()
        # The experts' matrices are stacked along the rows; biases have one row per expert.
        shape = (count * sizes[0], sizes[1]) if len(sizes) == 2 else (count, sizes[0])
        super().__init__(shape, {"": shard}, dtype, device)
        self.is_transposed, self.is_interleaved = is_transposed, is_interleaved

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        shard = self.shards[shard_name]
        part = tensor if tuple(tensor.shape) == shard.local_shape else shard.local_part(tensor)
        if self.is_transposed:
            part = part.transpose(1, 2)
        if self.is_interleaved:
            part = part.unflatten(1, (-1, 2)).transpose(1, 2)
        self.allocate().copy_(part.reshape(self.shape))

    def stored(self, ours: Tensor) -> Tensor:
        """Return this rank's part in the order of rows and dimensions that the checkpoint uses.

        Args:
            ours: this rank's tensor, `shape`, in the order in which `fill` wrote it.
        """
        shape = self.shards[""].local_shape
        if self.is_transposed:
            shape = (shape[0], shape[2], shape[1])
        part = ours.reshape(shape)
        if self.is_interleaved:
            part = part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return part.transpose(1, 2) if self.is_transposed else part


def stacked_parameters(
    spec: ExpertsSpec,
    name: str,
    hidden: int,
    inner: Output,
    mine: range,
    context: BuildContext,
) -> StackedParameter:
    """Return a parameter of experts that a checkpoint stores as one tensor.

    Args:
        spec: description of the experts.
        name: `gate_up`, `down`, or one of these with `_bias`.
        hidden: width of the model.
        inner: this rank's rows of an expert's gate.
        mine: the experts of this rank.
        context: dtype and device.
    """
    form = spec.stacked
    assert form is not None, "the checkpoint has tensors of each expert"
    is_down, is_bias = name.startswith("down"), name.endswith("bias")
    out, width = (hidden, inner.size) if is_down else (2 * inner.size, hidden)
    is_transposed = form.is_transposed and not is_bias
    sizes = (out,) if is_bias else (width, out) if is_transposed else (out, width)
    shape = spec.num_experts, *sizes
    # The dimension of the rows of gate and up, or of the columns of down.
    dim = 2 if is_transposed != is_down else 1
    if len(mine) < spec.num_experts:
        shard = WeightShard(shape, 0, 0, mine.start, len(mine))
    elif inner.length == inner.size or (is_down and is_bias):
        shard = WeightShard(shape)
    elif is_down:
        shard = WeightShard(shape, 0, dim, inner.start, inner.length)
    elif form.is_interleaved:
        shard = WeightShard(shape, 0, dim, 2 * inner.start, 2 * inner.length)
    else:
        shard = WeightShard(shape, 0, dim, inner.start, inner.length, 2)
    return StackedParameter(
        shard,
        context.dtype,
        context.device,
        is_transposed=is_transposed,
        is_interleaved=form.is_interleaved and not is_down,
    )
