"""Attention over the paged cache with the device's best kernels, or the plain-torch reference."""

from __future__ import annotations

from torch import Tensor

from kernels.paged_attention import PAGED_ATTENTION, PagedAttentionKernels
from kernels.rope import ROPE, RopeKernels
from kernels.table import Choice
from runtime.models.attention.backend import AttentionLayer, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.attention.rotation import rotate_and_write, values_of, write_heads

Chosen = tuple[Choice[RopeKernels], Choice[PagedAttentionKernels]]


class PagedAttention:
    """Rotates, writes and attends with the implementations that the device's tables choose.

    Attributes:
        choices: what was chosen and why, for the log.
    """

    is_graph_safe = False
    reads_host = False

    def __init__(self, device_type: str = "cpu", limits: StepLimits | None = None) -> None:
        """Choose implementations for `device_type`; they need no `limits`.

        Raises:
            RuntimeError: a requested implementation cannot run here.
        """
        del limits
        rope, attention = self._choose(device_type)
        self.choices = (rope, attention)
        self._rope = rope.kernels
        self._paged_attention = attention.kernels.paged_attention

    def _choose(self, device_type: str) -> Chosen:
        return ROPE.choose(device_type), PAGED_ATTENTION.choose(device_type)

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing to prepare: the kernels read the batch's own tensors."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write keys and values; see `AttentionBackend.write`."""
        write_heads(self._rope, layer, k, v, batch)

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Rotate, write and attend; see `AttentionBackend.run`."""
        return self.attend(layer, rotate_and_write(self._rope, layer, qkv, batch), batch)

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend one layer; see `AttentionBackend.attend`."""
        kv = batch.kv[layer.layer_idx]
        out = self._paged_attention(
            q,
            kv.k,
            kv.v,
            batch.page_table,
            batch.seq_lens,
            batch.qo_indptr,
            layer.scale,
            layer.window_left,
            None,
            batch.key_ends,
            layer.softcap,
            layer.sinks,
        )
        return values_of(layer, out)


class ReferenceAttention(PagedAttention):
    """Paged attention in plain torch on any device.

    It is slow, and other back ends are tested against it.
    """

    def _choose(self, device_type: str) -> Chosen:
        return (
            ROPE.choose(device_type, "reference"),
            PAGED_ATTENTION.choose(device_type, "reference"),
        )
