"""Attention over pages of the KV cache, with the device's fastest kernels or with plain torch."""

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
    """Attention over pages with the kernels that the device's kernel tables choose.

    Attributes:
        choices: the chosen kernels and the reasons, for the log.
    """

    is_graph_safe = False
    reads_host = False

    def __init__(self, device_type: str = "cpu", limits: StepLimits | None = None) -> None:
        """Choose kernels for `device_type`; `limits` are not used.

        Raises:
            RuntimeError: a requested kernel cannot run on this machine.
        """
        del limits
        rope, attention = self._choose(device_type)
        self.choices = (rope, attention)
        self._rope = rope.kernels
        self._paged_attention = attention.kernels.paged_attention

    def _choose(self, device_type: str) -> Chosen:
        return ROPE.choose(device_type), PAGED_ATTENTION.choose(device_type)

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: the kernels read the batch's own tensors."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write one layer's new keys and values to pages; see `AttentionBackend.write`."""
        write_heads(self._rope, layer, k, v, batch)

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Rotate heads, write keys and values, and attend; see `AttentionBackend.run`."""
        return self.attend(layer, rotate_and_write(self._rope, layer, qkv, batch), batch)

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute one layer's attention; see `AttentionBackend.attend`."""
        kv = batch.kv[layer.layer_idx]
        out = self._paged_attention(
            q,
            kv.k,
            kv.v,
            batch.pages_of(layer.layer_idx),
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
    """Attention over pages in plain torch, on any device.

    It is slow. Tests compare other back ends with it.
    """

    def _choose(self, device_type: str) -> Chosen:
        return (
            ROPE.choose(device_type, "reference"),
            PAGED_ATTENTION.choose(device_type, "reference"),
        )
