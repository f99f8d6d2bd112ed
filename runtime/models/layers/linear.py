"""Linear layers: fused, split among ranks, and packed by `kernels.linear` after loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from kernels.activation import Activation, Unary
from kernels.linear import PackedLinear
from kernels.lora import LoraBank
from kernels.rounding import Activations, Rounding
from runtime.models.layers.adapter_slots import AdaptedLinear, AdapterSlots
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.channel_weights import spans_shard
from runtime.models.layers.matrix import Matrix, PlainMatrix
from runtime.models.layers.parameter import Parameter, Stored, WeightHolder, WeightShard, whole

if TYPE_CHECKING:
    from runtime.models.quantization.method import DeviceMethod


@dataclass(frozen=True)
class Output:
    """One of the projections that a fused linear layer computes.

    Attributes:
        shard: name of the projection in the weight map, such as `q`.
        size: rows of its weight over all ranks.
        start, length: the rows of this rank.
        spans: rows of each span over all ranks, if the rank has a part of each of several spans
            instead of the rows from `start` on; otherwise empty.
        num_parts: for each span, the maximum number of parts into which it can be divided; see
            `spans_shard`.
    """

    shard: str
    size: int
    start: int
    length: int
    spans: tuple[int, ...] = ()
    num_parts: tuple[int, ...] = ()


def column(shard: str, size: int, context: BuildContext) -> Output:
    """Return the projection `shard`, whose `size` output rows are split evenly among ranks.

    Raises:
        ValueError: the number of ranks does not divide the rows.
    """
    if size % context.tp_size:
        raise ValueError(f"{size} rows of {shard!r} cannot be cut among {context.tp_size} ranks")
    length = size // context.tp_size
    return Output(shard, size, context.tp_rank * length, length)


def spanned(
    shard: str,
    spans: tuple[int, ...],
    context: BuildContext,
    num_parts: tuple[int, ...] = (),
) -> Output:
    """Return the projection `shard`, of which each rank has a part of every span of rows.

    `num_parts` has, for each span, the maximum number of parts into which it can be divided.

    Raises:
        ValueError: the rows of a span cannot be split evenly.
    """
    length = spans_shard(spans, (), context, num_parts=num_parts).num_rows
    return Output(shard, sum(spans), 0, length, spans, num_parts)


def heads(shard: str, num_heads: int, head_dim: int, context: BuildContext) -> Output:
    """Return the projection `shard`, whose heads are split among ranks.

    With fewer heads than ranks, several ranks have the same head.

    Raises:
        ValueError: neither the number of heads nor that of ranks divides the other.
    """
    if num_heads >= context.tp_size:
        if num_heads % context.tp_size:
            raise ValueError(
                f"{num_heads} heads of {shard!r} cannot be cut among {context.tp_size} ranks"
            )
        return column(shard, num_heads * head_dim, context)
    if context.tp_size % num_heads:
        raise ValueError(f"{context.tp_size} ranks cannot share {num_heads} heads of {shard!r}")
    head = context.tp_rank * num_heads // context.tp_size
    return Output(shard, num_heads * head_dim, head * head_dim, head_dim)


class Linear(WeightHolder):
    """A linear layer whose weight is kept in the packed layout of its kernel.

    Attributes:
        apply: maps `[num_tokens, in_features]` to the product. It includes the sum over ranks if
            one is needed. Valid after the weights are loaded.
        activated: `apply` followed by an activation; unavailable if ranks hold parts of a sum.
        gated: `activation(gate) * up`, where `gate` and `up` are the two halves of the product;
            unavailable if ranks hold parts of a sum.
        rounding: how the product rounds its input. If it is not `None`, `apply` and `gated` also
            take activations that are already rounded in this way.
        shards: the parts of the weight, by their names in the weight map.
    """

    __slots__ = (
        "_adapters",
        "activated",
        "adds_bias",
        "apply",
        "bias",
        "gated",
        "matrix",
        "place",
        "reduce",
        "shards",
    )

    apply: Callable[[Activations], Tensor]
    activated: Callable[[Tensor, Unary], Tensor]
    gated: Callable[[Activations, Activation], Tensor]

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        context: BuildContext,
        *,
        reduce: bool = False,
    ) -> None:
        """Keep the parameters.

        With `reduce`, each rank's product is one part of a sum over the ranks.

        Raises:
            ValueError: a sum over ranks is needed and the context has none.
        """
        self.matrix: Matrix = PlainMatrix(weight, context.linear)
        self.shards = weight.shards
        self._adapters: tuple[LoraBank, AdapterSlots] | None = None
        self.bias = bias
        self.adds_bias = not reduce or context.tp_rank == 0
        self.reduce = context.all_reduce if reduce and context.tp_size > 1 else None
        self.place = context.sum_place
        if reduce and context.tp_size > 1 and self.reduce is None:
            raise ValueError("a row-parallel linear on several ranks needs context.all_reduce")
        if bias is not None:
            bias.allocate()

    @classmethod
    def column_parallel(
        cls, in_features: int, outputs: list[Output], bias: bool, context: BuildContext
    ) -> Linear:
        """Make one product of several projections of the same input.

        Ranks split the output rows.
        """
        weights: dict[str, WeightShard] = {}
        biases: dict[str, WeightShard] = {}
        rows = 0
        for output in outputs:
            weights[output.shard] = _rows_of(output, (in_features,), rows, context)
            biases[output.shard] = _rows_of(output, (), rows, context)
            rows += output.length
        return cls(
            Parameter((rows, in_features), weights, context.dtype, context.device),
            Parameter((rows,), biases, context.dtype, context.device) if bias else None,
            context,
        )

    @classmethod
    def stacked(
        cls, in_features: int, block: Output, num_blocks: int, bias: bool, context: BuildContext
    ) -> Linear:
        """Make equal projections that checkpoints store as one tensor.

        Ranks split each projection.
        """
        place = (0, 0, block.start, block.length, num_blocks)
        weight = WeightShard((num_blocks * block.size, in_features), *place)
        of_bias = WeightShard((num_blocks * block.size,), *place)
        return cls(
            Parameter(weight.local_shape, {"": weight}, context.dtype, context.device),
            Parameter(of_bias.local_shape, {"": of_bias}, context.dtype, context.device)
            if bias
            else None,
            context,
        )

    @classmethod
    def row_parallel(
        cls, in_features: int, out_features: int, bias: bool, context: BuildContext
    ) -> Linear:
        """Make a product whose input columns ranks split; results are summed over ranks.

        Rank 0 adds the bias.

        Raises:
            ValueError: the number of ranks does not divide the columns.
        """
        if in_features % context.tp_size:
            raise ValueError(f"{in_features} columns cannot be cut among {context.tp_size} ranks")
        length = in_features // context.tp_size
        shard = WeightShard((out_features, in_features), 0, 1, context.tp_rank * length, length)
        return cls(
            Parameter((out_features, length), {"": shard}, context.dtype, context.device),
            Parameter((out_features,), whole((out_features,)), context.dtype, context.device)
            if bias
            else None,
            context,
            reduce=True,
        )

    @classmethod
    def replicated(
        cls, in_features: int, out_features: int, bias: bool, context: BuildContext
    ) -> Linear:
        """Make a product that is whole on every rank."""
        shape = (out_features, in_features)
        return cls(
            Parameter(shape, whole(shape), context.dtype, context.device),
            Parameter(shape[:1], whole(shape[:1]), context.dtype, context.device) if bias else None,
            context,
        )

    @property
    def rounding(self) -> Rounding | None:
        """How the product rounds its input; `None` if it takes floats."""
        packed = self.matrix.packed
        if packed is None or (self._adapters is not None and self._adapters[1].is_on):
            # Adapters need the input before it is rounded.
            return None
        return packed.rounding

    def gates_in_one_kernel(self, num_tokens: int) -> bool:
        """Whether `gated` is faster than `apply` followed by an activation, for so many tokens."""
        packed = self.matrix.packed
        if packed is None or (self._adapters is not None and self._adapters[1].is_on):
            return False
        return packed.gates_in_one_kernel(num_tokens)

    @property
    def packed(self) -> PackedLinear | None:
        """The product without the sum over ranks; `None` if the weight is not loaded."""
        return self.matrix.packed

    def store(self, method: DeviceMethod, weights: Stored) -> None:
        matrix, stored = self.matrix, weights.get("weight", {})
        assert isinstance(matrix, PlainMatrix), "a layer is stored once"
        kept = method.matrix(matrix.weight, stored)
        self.matrix = (
            matrix.filled_by(method.parameter(matrix.weight, stored)) if kept is None else kept
        )

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.matrix.parameters()
        if self.bias is not None:
            yield "bias", self.bias

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Pack the filled weight and drop the unpacked one."""
        bias = self.bias.allocate() if self.bias is not None and self.adds_bias else None
        old = self.matrix.packed
        packed = self.matrix.pack(kept, bias)
        if packed is not old:
            self._bind(packed)

    def adapt(self, bank: LoraBank, slots: AdapterSlots) -> None:
        """Add LoRA adapters to every product from now on. The weight must be loaded.

        If ranks hold parts of a sum, each rank adds its part of the adapters before the sum.
        """
        self._adapters = bank, slots
        assert self.matrix.packed is not None, "the weight is not loaded"
        self._bind(self.matrix.packed)

    def _bind(self, packed: PackedLinear) -> None:
        if self._adapters is not None:
            packed = AdaptedLinear(packed, *self._adapters)
        if self.reduce is None:
            # Rounded activations are passed only to products that have a `rounding`.
            self.apply = cast("Callable[[Activations], Tensor]", packed)
            self.gated = cast("Callable[[Activations, Activation], Tensor]", packed.gated)
            self.activated = packed.activated
        else:
            self.apply = partial(_summed, packed, self.reduce, self.place)

    def discard(self) -> None:
        self.matrix.discard()

    def plain(self, name: str) -> Tensor:
        if name == "bias":
            assert self.bias is not None, "the layer has no bias"
            return self.bias.allocate()
        return self.matrix.plain(name)

    def part(self, name: str, shard_name: str) -> Tensor:
        return (
            super().part(name, shard_name) if name == "bias" else self.matrix.part(name, shard_name)
        )

    def values(self, name: str, shard_name: str) -> Tensor:
        return (
            self.part(name, shard_name) if name == "bias" else self.matrix.values(name, shard_name)
        )

    def release(self) -> None:
        """Release the packed weight; the bias stays in memory."""
        self.matrix.release()
        self.apply = self.activated = self.gated = _released

    @property
    def size_bytes(self) -> int:
        return self.matrix.size_bytes


def _rows_of(
    output: Output, rest: tuple[int, ...], offset: int, context: BuildContext
) -> WeightShard:
    """Return this rank's rows of a projection, which fill a parameter from row `offset` on."""
    if not output.spans:
        return WeightShard((output.size, *rest), offset, 0, output.start, output.length)
    parts = output.num_parts
    return spans_shard(output.spans, rest, context, offset=offset, num_parts=parts)


def _summed(
    packed: PackedLinear,
    reduce: Callable[[Tensor], Tensor],
    place: Callable[[int, int], Tensor | None] | None,
    x: Any,
) -> Tensor:
    """Return the sum of the ranks' products.

    The product is written to the tensor that `place` returns, if any.
    """
    out = place(len(x), packed.out_features) if place is not None else None
    if out is None:
        return reduce(packed(x))
    packed.write(x, out)
    return reduce(out)


def _released(*_: object) -> Tensor:
    raise RuntimeError("the weights of this layer were released")
