"""Attention on a GPU with Triton kernels over pages, planned on the device, safe in CUDA graphs.

The keys of a whole prompt are also in the same tensor as its queries. If the device's fastest
kernel for plain tensors is faster for such a prompt than the kernel over pages, it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.paged_attention.prefix_group import PrefixGroup
from kernels.paged_attention.shared_prefix import SharedPrefixes
from kernels.paged_attention.triton import (
    AttentionPlan,
    AttentionWorkspace,
    plan_attention,
    run_attention,
)
from kernels.prompt_attention import PROMPT_ATTENTION
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


class TritonAttention:
    """Triton kernels for decode and extend; the host never reads a length from the device.

    The decode kernel splits a sequence's keys among thread blocks, the extend kernel takes blocks
    of queries. The work lists of a step are written once per distinct shape, when the step's first
    layer of that shape runs.
    """

    is_graph_safe = True
    reads_host = False

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Choose kernels for `device_type`; `limits` set the size of work space when it is made."""
        rope = ROPE.choose(device_type)
        prompt = PROMPT_ATTENTION.choose(device_type)
        self.choices: tuple[Choice[Any], ...] = (rope, prompt)
        self._rope = rope.kernels
        # The plain-torch implementation exists only for tests.
        self._prompt = None if prompt.name == "reference" else prompt.kernels
        self._limits = limits
        self._workspaces: dict[AttentionShape, AttentionWorkspace] = {}
        self._plans: dict[tuple[AttentionShape, int], AttentionPlan] = {}
        # Only layers without a window share prefixes: a window begins at another key for each
        # sequence.
        self._prefixes: dict[AttentionShape, SharedPrefixes] = {}
        # Kinds of layers (heads, key/value heads, head size, scale) whose prompt kernels are
        # prepared.
        self._ready: set[tuple[int, int, int, float]] = set()

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last step's work lists; the next layers write new ones."""
        del batch
        self._plans.clear()

    def put_prefixes(self, groups: Sequence[PrefixGroup]) -> None:
        """Send the groups of sequences with a common prefix to the device.

        The call does nothing before the first batch with `shares_prefixes`.
        """
        for prefixes in self._prefixes.values():
            prefixes.put(groups)

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write keys and values; see `AttentionBackend.write`."""
        write_heads(self._rope, layer, k, v, batch)

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute one layer's attention over pages only; see `AttentionBackend.attend`."""
        if layer.is_latent:
            return attend_latents(layer, q, batch, invariant=False)
        out = q.new_empty(len(q), layer.num_heads * layer.head_dim)
        self._attend_pages(layer, q, out, batch, len(batch.seq_lens))
        return values_of(layer, out)

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Rotate heads, write keys and values, and attend; see `AttentionBackend.run`."""
        q = rotate_and_write(self._rope, layer, qkv, batch)
        prompts = self._whole_prompts(layer, q, batch)
        num_rest = len(qkv) - sum(prompts)
        if prompts and not num_rest:
            return self._attend_prompts(layer, qkv, prompts)
        # Rows of padding after the last sequence's tokens are not written; see `ForwardBatch`.
        out = qkv.new_empty(len(qkv), layer.num_heads * layer.head_dim)
        num_seqs = len(batch.seq_lens) - len(prompts)
        self._attend_pages(layer, q[:num_rest], out[:num_rest], batch, num_seqs)
        if prompts:
            out[num_rest:] = self._attend_prompts(layer, qkv[num_rest:], prompts)
        return out

    def _attend_pages(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, batch: ForwardBatch, num_seqs: int
    ) -> None:
        """Compute attention of the first `num_seqs` sequences over their pages, into `out`."""
        key = layer.shape, num_seqs
        plan = self._plans.get(key) or self._plan(key, batch, len(q))
        kv = batch.kv[layer.layer_idx]
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

    def _whole_prompts(
        self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch
    ) -> Sequence[int]:
        """Return the lengths of the prompts at the step's end that the prompt kernel computes."""
        kernels, lengths, window = self._prompt, batch.whole_prompts, layer.window_left
        if kernels is None or not lengths or not kernels.supports(q):
            return ()
        if batch.key_ends is not None or not layer.is_plain:
            # The prompt kernels are causal and only scale scores.
            return ()
        first = len(lengths)
        while first and lengths[first - 1] >= kernels.MIN_LENGTH:
            if 0 <= window < lengths[first - 1] - 1:
                break
            first -= 1
        return lengths[first:]

    def _attend_prompts(self, layer: AttentionLayer, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        assert self._prompt is not None
        heads = qkv.unflatten(1, (-1, layer.head_dim))
        q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        self._prepare_prompts(layer, q)
        return self._prompt.prompt_attention(q, k, v, lengths, layer.scale)

    def _prepare_prompts(self, layer: AttentionLayer, q: Tensor) -> None:
        """Prepare the prompt kernels for all lengths, once for each kind of layer."""
        kind = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale
        if kind in self._ready:
            return
        self._ready.add(kind)
        most = self._limits.max_prompt_tokens
        if self._prompt is not None and most:
            longest = most if layer.cos_sin is None else len(layer.cos_sin)
            self._prompt.prepare(q, layer.num_kv_heads, longest, most, layer.scale)

    def _plan(
        self,
        key: tuple[AttentionShape, int],
        batch: ForwardBatch,
        num_tokens: int,
    ) -> AttentionPlan:
        """Write and keep the work lists of the first sequences; `key` is `(shape, num_seqs)`."""
        shape, num_seqs = key
        workspace = self._workspaces.get(shape)
        if workspace is None:
            workspace = AttentionWorkspace(
                self._limits.max_seqs,
                self._limits.max_tokens,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                batch.seq_lens.device,
            )
            self._workspaces[shape] = workspace
        prefixes = None
        if batch.shares_prefixes and shape.window_left < 0:
            prefixes = self._prefixes.get(shape)
            if prefixes is None:
                prefixes = self._prefixes[shape] = SharedPrefixes(workspace)
        num_chunks = len(batch.seq_lens) - (batch.num_decodes or 0)
        plan = plan_attention(
            workspace,
            batch.seq_lens[:num_seqs],
            batch.qo_indptr[: num_seqs + 1],
            num_tokens,
            batch.num_decodes,
            shape.window_left,
            prefixes,
            short_prompts=len(batch.whole_prompts) == num_chunks,
        )
        self._plans[key] = plan
        return plan
