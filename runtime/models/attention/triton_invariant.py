"""Batch-invariant attention on a GPU with one Triton kernel for decode and extend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.paged_attention.triton_invariant import (
    InvariantPlan,
    InvariantWorkspace,
    plan_attention,
    run_attention,
)
from kernels.rope import ROPE
from kernels.table import Choice
from runtime.models.attention.backend import AttentionLayer, AttentionShape, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.attention.rotation import (
    attend_latents,
    rotate_and_write,
    values_of,
    write_heads,
)


class InvariantTritonAttention:
    """Attention on a GPU whose result for a query has the same bits in every batch and every chunk.

    A token that is recomputed in a prompt also gets the bits that it had when it was decoded.

    As in `TritonAttention`, the host never reads a length from the device. The work list of a step
    is written once per distinct shape, when the step's first layer of that shape runs.
    """

    is_graph_safe = True
    reads_host = False

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Choose kernels for `device_type`; `limits` set the size of work space when it is made."""
        rope = ROPE.choose(device_type, invariant=True)
        self.choices: tuple[Choice[Any], ...] = (rope,)
        self._rope = rope.kernels
        self._limits = limits
        self._workspaces: dict[AttentionShape, InvariantWorkspace] = {}
        self._plans: dict[AttentionShape, InvariantPlan] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last step's work lists; the next layers write new ones."""
        del batch
        self._plans.clear()

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write keys and values; see `AttentionBackend.write`."""
        write_heads(self._rope, layer, k, v, batch)

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Rotate heads, write keys and values, and attend; see `AttentionBackend.run`."""
        return self.attend(layer, rotate_and_write(self._rope, layer, qkv, batch), batch)

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute one layer's attention over pages; see `AttentionBackend.attend`."""
        if layer.is_latent:
            return attend_latents(layer, q, batch, invariant=True)
        plan = self._plans.get(layer.shape) or self._plan(layer, q.device, batch)
        kv = batch.kv[layer.layer_idx]
        out = q.new_empty(len(q), layer.num_heads * layer.head_dim)
        run_attention(
            plan,
            q,
            kv.k,
            kv.v,
            batch.pages_of(layer.layer_idx),
            layer.scale,
            out,
            batch.key_ends,
            layer.softcap,
            layer.sinks,
        )
        return values_of(layer, out)

    def _plan(
        self, layer: AttentionLayer, device: torch.device, batch: ForwardBatch
    ) -> InvariantPlan:
        workspace = self._workspaces.get(layer.shape)
        if workspace is None:
            workspace = self._workspaces[layer.shape] = InvariantWorkspace(
                self._limits.max_seqs,
                self._limits.max_tokens,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                device,
            )
        page_size = batch.kv[layer.layer_idx].k.shape[2]
        plan = self._plans[layer.shape] = plan_attention(
            workspace,
            batch.seq_lens,
            batch.qo_indptr,
            len(batch.input_ids),
            batch.page_table.shape[1] * page_size,
            layer.window_left,
        )
        return plan
