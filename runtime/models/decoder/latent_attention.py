"""Attention over latents (MLA) in the absorbed form.

Queries are mapped to the space of the latents, and attention is computed there. Only the results of
attention are expanded to heads.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.latent_attention import rotate_and_keep
from kernels.rounding import Activations, Rounding
from runtime.checkpoint.attention_spec import LatentAttentionSpec
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear, Output, column
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.rope import RopeTables

# Epsilon of the norms of latents, whatever the model's own epsilon is.
_EPS = 1e-6


class UpProjection(Linear):
    """The matrix that expands latents to keys and values (`kv_b_proj`), with a copy for attention.

    The matrix is loaded and updated like any other. Its numbers are then copied to a second layout,
    grouped by heads. The copy is small compared with the experts of such models.

    Attributes:
        to_latent: `[num_heads, nope_dim, rank]`, maps queries to the space of the latents.
        from_latent: `[num_heads, rank, output_dim]`, maps results of attention to values.
    """

    __slots__ = ("_sizes", "from_latent", "to_latent")

    to_latent: Tensor
    from_latent: Tensor
    _sizes: tuple[int, int]

    @classmethod
    def of_heads(cls, latent: LatentAttentionSpec, context: BuildContext) -> UpProjection:
        """Create the projection with those rows of the matrix that belong to this rank's heads."""
        size = latent.nope_dim + latent.output_dim
        rows = column("", latent.num_heads * size, context)
        made = cls.column_parallel(latent.value_dim, [rows], False, context)
        assert isinstance(made, UpProjection)
        count = rows.length // size
        made._sizes = (latent.nope_dim, latent.output_dim)
        shapes = (
            (count, latent.nope_dim, latent.value_dim),
            (count, latent.value_dim, latent.output_dim),
        )
        made.to_latent, made.from_latent = (
            torch.empty(shape, dtype=context.dtype, device=context.device) for shape in shapes
        )
        return made

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        super().finalize(kept)
        by_head = self.values("weight", "").unflatten(0, (-1, sum(self._sizes)))
        keys, values = by_head.split(self._sizes, dim=1)
        # In place: CUDA graphs hold the addresses.
        self.to_latent.copy_(keys)
        self.from_latent.copy_(values.transpose(1, 2))

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self.to_latent.nbytes + self.from_latent.nbytes


class HalfUpProjection(Linear):
    """The rows of `UpProjection` for keys only, or for values only.

    A GGUF checkpoint stores the two halves as separate tensors.

    Attributes:
        by_head: `[num_heads, columns, rows of a head]`. For `k_b_proj`, whose rows are stored
            transposed, this is `to_latent` of `UpProjection`; for `v_b_proj`, it is `from_latent`.
    """

    __slots__ = ("by_head",)

    by_head: Tensor

    @classmethod
    def of_heads(
        cls, num_heads: int, head_rows: int, columns: int, context: BuildContext
    ) -> HalfUpProjection:
        """Create the projection with those rows of the matrix that belong to this rank's heads.

        Args:
            num_heads: heads of all ranks together.
            head_rows: rows of the matrix for each head.
            columns: columns of the matrix.
            context: dtype, device and rank.
        """
        rows = column("", num_heads * head_rows, context)
        made = cls.column_parallel(columns, [rows], False, context)
        assert isinstance(made, HalfUpProjection)
        shape = rows.length // head_rows, columns, head_rows
        made.by_head = torch.empty(shape, dtype=context.dtype, device=context.device)
        return made

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        super().finalize(kept)
        heads = self.values("weight", "").unflatten(0, (len(self.by_head), -1))
        # In place: CUDA graphs hold the addresses.
        self.by_head.copy_(heads.transpose(1, 2))

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self.by_head.nbytes


class LatentAttention(Mixer):
    """Self-attention of one layer over latents. A rank has all latents and a part of the heads."""

    __slots__ = (
        "_spec",
        "_up",
        "attention",
        "from_latent",
        "kv_a_layernorm",
        "q_a_layernorm",
        "q_b_proj",
        "qkv_a_proj",
        "to_latent",
    )

    name = "self_attn"

    def __init__(
        self,
        spec: DecoderSpec,
        latent: LatentAttentionSpec,
        context: BuildContext,
        layer_idx: int,
        ropes: RopeTables,
    ) -> None:
        self._spec = latent
        query = column("q", latent.num_heads * (latent.nope_dim + latent.rope_dim), context)
        kv = Output("kv", latent.head_dim, 0, latent.head_dim)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        first = query
        if latent.query_rank:
            first = Output("q", latent.query_rank, 0, latent.query_rank)
            self.q_a_layernorm = RMSNorm(latent.query_rank, _EPS, context)
            whole = Output("", query.size, query.start, query.length)
            self.q_b_proj = Linear.column_parallel(latent.query_rank, [whole], False, context)
        self.qkv_a_proj = Linear.column_parallel(
            spec.hidden_size, [first, kv], spec.attention_bias, context
        )
        self.kv_a_layernorm = RMSNorm(latent.value_dim, _EPS, context)
        self._up: dict[str, Linear]
        if latent.has_split_up:
            heads, rank = latent.num_heads, latent.value_dim
            keys = HalfUpProjection.of_heads(heads, rank, latent.nope_dim, context)
            values = HalfUpProjection.of_heads(heads, latent.output_dim, rank, context)
            self._up = {"k_b_proj": keys, "v_b_proj": values}
            self.to_latent, self.from_latent = keys.by_head, values.by_head
        else:
            both = UpProjection.of_heads(latent, context)
            self._up = {"kv_b_proj": both}
            self.to_latent, self.from_latent = both.to_latent, both.from_latent
        self.o_proj = Linear.row_parallel(
            latent.num_heads * latent.output_dim, spec.hidden_size, spec.output_bias, context
        )
        assert latent.rope is not None
        self.attention = AttentionLayer(
            layer_idx=layer_idx,
            num_heads=len(self.to_latent),
            num_kv_heads=1,
            head_dim=latent.head_dim,
            value_dim=latent.value_dim,
            scale=latent.scale,
            cos_sin=ropes.table(latent.rope, latent.rope_dim),
            is_latent=True,
        )

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        return self.qkv_a_proj.rounding

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`, a new tensor."""
        spec, layer = self._spec, self.attention
        assert spec.rope is not None
        assert layer.cos_sin is not None
        both = self.qkv_a_proj.apply(hidden)
        heads, kv = both[:, : -spec.head_dim], both[:, -spec.head_dim :]
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            heads = self.q_b_proj.apply(self.q_a_layernorm.forward(heads.contiguous()))
        heads = heads.unflatten(1, (layer.num_heads, -1))
        q = both.new_empty(len(both), layer.num_heads, spec.head_dim)
        # Shapes: `[num_heads, num_tokens, nope_dim]` times `[num_heads, nope_dim, rank]`.
        absorbed = torch.bmm(heads[:, :, : spec.nope_dim].transpose(0, 1), self.to_latent)
        q[:, :, : spec.value_dim] = absorbed.transpose(0, 1)
        rotate_and_keep(
            heads[:, :, spec.nope_dim :],
            kv,
            self.kv_a_layernorm.weight,
            _EPS,
            layer.cos_sin,
            spec.rope.interleaved,
            batch.positions,
            batch.slots,
            batch.kv[layer.layer_idx].k,
            q,
        )
        out = batch.attention.attend(layer, q, batch).unflatten(1, (layer.num_heads, -1))
        expanded = torch.bmm(out.transpose(0, 1), self.from_latent)
        return expanded.transpose(0, 1).flatten(1)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the parts of the layer that own weights, with their names under `prefix`."""
        yield f"{prefix}.qkv_a_proj", self.qkv_a_proj
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            yield f"{prefix}.q_a_layernorm", self.q_a_layernorm
            yield f"{prefix}.q_b_proj", self.q_b_proj
        yield f"{prefix}.kv_a_layernorm", self.kv_a_layernorm
        for name, up in self._up.items():
            yield f"{prefix}.{name}", up
        yield f"{prefix}.o_proj", self.o_proj
