"""Attention with a gate on its output and partial rotary embedding (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.activation import sigmoid_mul
from kernels.rounding import Activations, Rounding
from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.attention.rotation import turn
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear, heads
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.rope import RopeTables


class GatedAttention(Mixer):
    """Self-attention of one layer whose output is multiplied by a sigmoid gate.

    One fused product gives queries with their gates, keys and values. Queries and keys are then
    normed and rotated.
    """

    __slots__ = ("_cos_sin", "attention", "k_norm", "q_norm", "qkv_proj")

    name = "self_attn"

    def __init__(
        self,
        spec: AttentionSpec,
        hidden: int,
        context: BuildContext,
        layer_idx: int,
        ropes: RopeTables,
        *,
        eps: float,
        bias: bool,
    ) -> None:
        assert spec.rope is not None, "its heads rotate"
        head_dim = spec.head_dim
        query = heads("q", spec.num_heads, 2 * head_dim, context)
        key = heads("k", spec.num_kv_heads, head_dim, context)
        value = heads("v", spec.num_kv_heads, head_dim, context)
        self.qkv_proj = Linear.column_parallel(hidden, [query, key, value], bias, context)
        self.o_proj = Linear.row_parallel(spec.num_heads * head_dim, hidden, bias, context)
        self.q_norm = RMSNorm(head_dim, eps, context, zero_centered=True)
        self.k_norm = RMSNorm(head_dim, eps, context, zero_centered=True)
        self._cos_sin = ropes.table(spec.rope, spec.rotary_dim or head_dim)
        self.attention = AttentionLayer(
            layer_idx=layer_idx,
            num_heads=query.length // (2 * head_dim),
            num_kv_heads=key.length // head_dim,
            head_dim=head_dim,
            scale=spec.scale,
        )

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        return self.qkv_proj.rounding

    @property
    def cos_sin(self) -> Tensor | None:
        """The rotary table, `[max_positions, rotary_dim]`, or `None` if heads are not rotated."""
        return self._cos_sin

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`, a new tensor.

        Norm and rotate the heads, attend, and apply the gate.
        """
        layer = self.attention
        num_heads, num_kv, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        product = self.qkv_proj.apply(hidden)
        sizes = [2 * num_heads * head_dim, num_kv * head_dim, num_kv * head_dim]
        both, key, value = product.split(sizes, dim=1)
        query, gate = both.unflatten(1, (num_heads, 2, head_dim)).unbind(2)
        table = self._cos_sin if batch.cos_sin is None else batch.cos_sin
        cos_sin = table.index_select(0, batch.positions).unsqueeze(1)
        k = turn(self._normed(key.unflatten(1, (num_kv, head_dim)), self.k_norm), cos_sin)
        q = turn(self._normed(query, self.q_norm), cos_sin)
        batch.attention.write(layer, k, value.unflatten(1, (num_kv, head_dim)), batch)
        return sigmoid_mul(gate.flatten(1), batch.attention.attend(layer, q, batch))

    @staticmethod
    def _normed(part: Tensor, norm: RMSNorm) -> Tensor:
        return norm.forward(part.reshape(-1, part.shape[-1]).contiguous()).view(part.shape)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.qkv_proj", self.qkv_proj
        yield f"{prefix}.o_proj", self.o_proj
        yield f"{prefix}.q_norm", self.q_norm
        yield f"{prefix}.k_norm", self.k_norm
