"""Decoder layers that keep a recurrent state instead of keys and values. Imports no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import RecurrentState, StatePart, WeightSpec
from runtime.models.decoder.weight_map import linear_weights, norm_weight


class RecurrentSpec(ABC):
    """The sizes of one layer's recurrence, over all ranks.

    They determine the layer's state, its weights and how ranks split it.
    """

    @property
    @abstractmethod
    def state(self) -> RecurrentState:
        """The state that the layer keeps of a sequence between steps."""

    @abstractmethod
    def weights(self, prefix: str, hidden: int) -> Sequence[WeightSpec]:
        """Return the weights of the layer named `prefix`, except its norms and its MLP.

        Args:
            prefix: name of the layer, the same in the checkpoint and in our model.
            hidden: width of the residual stream.
        """

    @abstractmethod
    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return the parts that ranks cannot share evenly; see `ModelSpec.uneven_parts`."""

    def norms_across_ranks(self, tp_size: int) -> bool:  # noqa: ARG002  # most norm each head
        """Whether ranks share a norm, because it covers elements of several ranks."""
        return False


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution, `C * conv(B * x)`, as in LFM2.

    B, C and x are projections of the input.

    Attributes:
        channels: channels of the convolution over all ranks.
        width: tokens that the convolution reads, including the newest.
        has_bias: whether the convolution and the projections before and after it have biases.
    """

    channels: int
    width: int
    has_bias: bool = False

    @property
    def state(self) -> RecurrentState:
        """The convolution's last `width - 1` inputs."""
        return RecurrentState((StatePart((self.width - 1, self.channels), split_dim=1),))

    def weights(self, prefix: str, hidden: int) -> Sequence[WeightSpec]:
        """Return the weights of the convolution and its two projections; see `RecurrentSpec`."""
        name, channels, bias = f"{prefix}.conv", self.channels, self.has_bias
        rows = 3 * channels
        return [
            *linear_weights(f"{name}.in_proj", f"{name}.in_proj", (rows, hidden), bias=bias),
            *conv_weights(f"{name}.conv", channels, self.width, bias=bias),
            *linear_weights(f"{name}.out_proj", f"{name}.o_proj", (hidden, channels), bias=bias),
        ]

    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return the channels if ranks cannot share them evenly; see `RecurrentSpec`."""
        return [f"{self.channels} channels of a convolution"] if self.channels % tp_size else []


def conv_weights(name: str, channels: int, width: int, *, bias: bool = False) -> list[WeightSpec]:
    """Return the weights of a convolution that treats each channel by itself.

    Args:
        name: name of the convolution, the same in the checkpoint and in our model.
        channels: number of channels.
        width: tokens that the convolution reads.
        bias: whether it has a bias.
    """
    weights = [WeightSpec(f"{name}.weight", (channels, 1, width), f"{name}.weight", kind="other")]
    if bias:
        weights.append(WeightSpec(f"{name}.bias", (channels,), f"{name}.bias", kind="bias"))
    return weights


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(RecurrentSpec):
    """Gated DeltaNet: a short convolution, then linear attention with the gated delta rule.

    Attributes:
        num_key_heads: heads of queries and keys over all ranks.
        num_value_heads: heads of values over all ranks, a multiple of `num_key_heads`. Consecutive
            value heads share a key head.
        key_dim, value_dim: elements of a key head and of a value head.
        width: tokens that the convolution reads, including the newest.
        eps: epsilon of the norm of each head's output.
        has_flat_rows: the order of rows in checkpoints. If true, one tensor holds q, k and v of all
            heads; z and the two gates each have a tensor of their own (Qwen3.5). Otherwise one
            tensor holds q, k, v and z, and another holds the gates; in each, the rows of one key
            head are adjacent (Qwen3-Next).
        has_tiled_outputs: whether the columns of the output product are in the order of GGUF files
            of Qwen3.5, in which value heads of different key heads are adjacent.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    has_flat_rows: bool = False
    has_tiled_outputs: bool = False

    @property
    def spans(self) -> tuple[int, int, int]:
        """Number of channels of the convolution for queries, keys and values, over all ranks."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def group_rows(self) -> tuple[int, int]:
        """Number of rows that one key head has in `in_proj_qkvz` and in `in_proj_ba`."""
        ratio = self.num_value_heads // self.num_key_heads
        return 2 * self.key_dim + 2 * ratio * self.value_dim, 2 * ratio

    @property
    def state(self) -> RecurrentState:
        """The convolution's last `width - 1` inputs, and a matrix for each value head."""
        matrix = (self.num_value_heads, self.key_dim, self.value_dim)
        return RecurrentState(
            (
                StatePart((self.width - 1, sum(self.spans)), split_dim=1),
                StatePart(matrix, dtype="float32"),
            )
        )

    def weights(self, prefix: str, hidden: int) -> Sequence[WeightSpec]:
        """Return the weights of the layer's projections, convolution, gates and norm."""
        name, heads, values = f"{prefix}.linear_attn", (self.num_value_heads,), self.spans[2]
        weights: list[WeightSpec] = []
        for target, shard, rows in self._products():
            stored, shape = f"{name}.in_proj_{shard}", (rows, hidden)
            weights += linear_weights(stored, f"{name}.{target}", shape, shard)
        weights += conv_weights(f"{name}.conv1d", sum(self.spans), self.width)
        for vector in ("dt_bias", "A_log"):
            weights.append(
                WeightSpec(f"{name}.{vector}", heads, f"{name}.{vector}.vector", kind="bias")
            )
        weights.append(norm_weight(f"{name}.norm", self.value_dim))
        # The other name tells the two orders apart, so that neither is loaded as the other one.
        out = f"{name}.tiled_out_proj" if self.has_tiled_outputs else f"{name}.out_proj"
        return weights + linear_weights(out, f"{name}.o_proj", (hidden, values))

    def _products(self) -> list[tuple[str, str, int]]:
        """Return each stored product: its target in our model, its shard, its total rows."""
        if self.has_flat_rows:
            values, heads = self.spans[2], self.num_value_heads
            inputs = [("in_proj", "qkv", sum(self.spans)), ("in_proj", "z", values)]
            return [*inputs, ("gate_proj", "b", heads), ("gate_proj", "a", heads)]
        both = zip(("qkvz", "ba"), self.group_rows, strict=True)
        return [("in_proj", shard, rows * self.num_key_heads) for shard, rows in both]

    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return the key heads if ranks cannot share them evenly; see `RecurrentSpec`."""
        heads = self.num_key_heads
        if self.has_tiled_outputs and tp_size > 1:
            # In this order, the columns of a rank's heads are not adjacent.
            return [f"{self.num_value_heads} value heads in the order of a GGUF file"]
        return [f"{heads} key heads of linear attention"] if heads % tp_size else []


def check_time_steps(config: Keys) -> None:
    """Refuse limits on Mamba's time steps, which no published model has.

    Raises:
        StartupError: `time_step_limit` sets a limit.
    """
    limit = config.values.get("time_step_limit")
    # transformers 5 writes infinity as an object.
    endless = (math.inf, {"__float__": "Infinity"})
    is_free = isinstance(limit, list) and len(limit) == 2 and not limit[0] and limit[1] in endless
    if limit is not None and not is_free:
        raise config.error("time_step_limit", "[0, Infinity]")


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba 2: a short convolution, a recurrence over a matrix for each head, and a gated norm.

    Attributes:
        num_groups: number of groups of consecutive heads. The heads of a group share two vectors
            per token.
        num_heads: heads over all ranks, a multiple of `num_groups`.
        head_dim: elements of a head.
        state_dim: elements of each of the vectors that the heads of a group share.
        width: tokens that the convolution reads, including the newest.
        eps: epsilon of the norm, which covers the heads of a group together.
        has_conv_bias: whether the convolution has a bias.
        has_bias: whether the input and the output product have biases.
        name: name of the layer's part in a checkpoint.
    """

    num_groups: int
    num_heads: int
    head_dim: int
    state_dim: int
    width: int
    eps: float
    has_conv_bias: bool = True
    has_bias: bool = False
    name: str = "mamba"

    @property
    def inner(self) -> int:
        """Number of elements of all heads over all ranks."""
        return self.num_heads * self.head_dim

    @property
    def conv_spans(self) -> tuple[int, int, int]:
        """Channels of the convolution: for heads' inputs, and for each of a group's two vectors."""
        of_groups = self.num_groups * self.state_dim
        return self.inner, of_groups, of_groups

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """For each span of `conv_spans`, into how many parts ranks can divide it at most."""
        return self.num_heads, self.num_groups, self.num_groups

    @property
    def state(self) -> RecurrentState:
        """The convolution's last `width - 1` inputs, and a matrix for each head."""
        inputs, *shared = self.conv_spans
        channels = StatePart(
            (self.width - 1, inputs + sum(shared)),
            split_dim=1,
            num_shared=sum(shared),
            num_groups=self.num_groups,
        )
        matrix = StatePart((self.num_heads, self.state_dim, self.head_dim), dtype="float32")
        return RecurrentState((channels, matrix))

    def weights(self, prefix: str, hidden: int) -> Sequence[WeightSpec]:
        """Return the weights of the layer named `prefix`, except its norms and its MLP."""
        name, ours, channels = f"{prefix}.{self.name}", f"{prefix}.mamba", sum(self.conv_spans)
        rows, bias = self.inner + channels + self.num_heads, self.has_bias
        weights = linear_weights(f"{name}.in_proj", f"{ours}.in_proj", (rows, hidden), bias=bias)
        for weight in conv_weights(f"{name}.conv1d", channels, self.width, bias=self.has_conv_bias):
            weights.append(replace(weight, target=weight.target.replace(name, ours)))
        for vector in ("A_log", "dt_bias", "D"):
            stored, shape = f"{name}.{vector}", (self.num_heads,)
            weights.append(WeightSpec(stored, shape, f"{ours}.heads.vector", vector, kind="bias"))
        weights.append(norm_weight(f"{name}.norm", self.inner, f"{ours}.norm"))
        out = f"{name}.out_proj"
        return weights + linear_weights(out, f"{ours}.o_proj", (hidden, self.inner), bias=bias)

    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return what ranks cannot share evenly, such as `8 groups of heads of Mamba`."""
        groups = self.num_groups
        # With fewer groups than ranks, several ranks have a copy of the same group.
        shared_unevenly = groups % tp_size if groups >= tp_size else tp_size % groups
        parts = (
            (self.num_heads % tp_size, f"{self.num_heads} heads of Mamba"),
            (shared_unevenly, f"{groups} groups of heads of Mamba"),
        )
        return [what for rest, what in parts if rest]

    def norms_across_ranks(self, tp_size: int) -> bool:
        """Whether the elements of one norm group are split among several ranks."""
        return self.num_groups < tp_size
