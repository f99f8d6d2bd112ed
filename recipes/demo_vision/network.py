"""The Qwen2.5-VL architecture in plain torch, for training on rows of fixed size.

Windows, pictures and questions are separated by masks, so that shapes do not depend on the data.
`checkpoint_weights` gives the parameters under the checkpoint's names.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.demo_vision.draw import PATCH
from recipes.demo_vision.rows import PATCH_BYTES
from recipes.demo_vision.shape import MEAN, STD, VisionShape

Batch = dict[str, Tensor]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves; `x` is `[batch, heads, len, head_dim]`."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class _RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # The fused kernel requires one dtype.
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _Mlp(nn.Module):
    def __init__(self, hidden: int, wide: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=bias)
        self.up_proj = nn.Linear(hidden, wide, bias=bias)
        self.down_proj = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _TowerAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, size = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, size))


class _TowerBlock(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        size = shape.tower_size
        self.norm1, self.norm2 = _RmsNorm(size, 1e-6), _RmsNorm(size, 1e-6)
        self.attn = _TowerAttention(size, shape.tower_heads)
        self.mlp = _Mlp(size, shape.tower_intermediate, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class _Merger(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.ln_q = _RmsNorm(size, 1e-6)
        self.mlp = nn.Sequential(nn.Linear(4 * size, 4 * size), nn.GELU(), nn.Linear(4 * size, out))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, size = x.shape
        return self.mlp(self.ln_q(x).view(batch, count // 4, 4 * size))


class _Tower(nn.Module):
    mean: Tensor
    std: Tensor
    frequencies: Tensor

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        # Both frames of a patch are the same picture, so one matrix serves both; the checkpoint
        # halves it.
        self.patch_embed = nn.Linear(PATCH_BYTES, shape.tower_size, bias=False)
        self.blocks = nn.ModuleList(_TowerBlock(shape) for _ in range(shape.tower_depth))
        self.merger = _Merger(shape.tower_size, shape.hidden_size)
        self.full = frozenset(shape.full_attention)
        quarter = torch.arange(0, shape.tower_size // shape.tower_heads // 2, 2).float()
        frequencies = 10000.0 ** -(quarter / (shape.tower_size // shape.tower_heads // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("mean", torch.tensor(MEAN).repeat(PATCH * PATCH), persistent=False)
        self.register_buffer("std", torch.tensor(STD).repeat(PATCH * PATCH), persistent=False)

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        pixels = ((batch["pixels"].float() / 255 - self.mean) / self.std).to(dtype)
        x = self.patch_embed(pixels)
        # Angles of the row, then of the column.
        angles = (batch["place"].float()[..., None] * self.frequencies).flatten(-2)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        picture = batch["picture"].int()
        window = picture * 256 + batch["window"].int()
        whole = (picture[:, :, None] == picture[:, None, :])[:, None]
        parts = (window[:, :, None] == window[:, None, :])[:, None]
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, whole if index in self.full else parts)
        return self.merger(x)


class _Attention(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.heads, self.dim = shape.num_attention_heads, shape.head_dim
        self.kv_heads = shape.num_key_value_heads
        hidden = shape.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.dim)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        # Fused attention does not support a mask together with grouped heads.
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class _Layer(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape.hidden_size, shape.intermediate_size, bias=False)
        self.input_layernorm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Trunk(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)


class VisionNetwork(nn.Module):
    """Tower and language model with tied embeddings."""

    frequencies: Tensor
    axis: Tensor

    def __init__(self, shape: VisionShape, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.visual = _Tower(shape)
        self.model = _Trunk(shape)
        self.compute_dtype = compute_dtype
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        self.register_buffer("frequencies", shape.rope_theta**-half, persistent=False)
        axis = [a for a, count in enumerate(shape.mrope_section) for _ in range(count)]
        self.register_buffer("axis", torch.tensor(axis), persistent=False)
        self._initialise(shape)

    def _initialise(self, shape: VisionShape) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                depth = shape.tower_depth if "visual" in name else shape.num_hidden_layers
                deep = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
                scale = 0.02 if "embed_tokens" in name else parameter.shape[1] ** -0.5 * 0.5
                nn.init.normal_(parameter, std=scale / (2 * depth) ** 0.5 if deep else scale)

    def see(self, batch: Batch) -> Tensor:
        """The pictures' vectors `[rows, cells, hidden]`."""
        return self.visual(batch, self.compute_dtype)

    def forward(self, batch: Batch, seen: Tensor | None = None) -> Tensor:
        """Hidden states `[rows, length, hidden]`, normalised, of a batch of rows.

        `seen` is the result of `see` for the batch, if known.
        """
        x = self.model.embed_tokens(batch["ids"].int()).to(self.compute_dtype)
        rows, length, hidden = x.shape
        seen = (self.see(batch) if seen is None else seen).to(x.dtype)
        slot = batch["slot"].long()
        start = torch.arange(rows, device=x.device)[:, None] * length
        # Entries without a place are written to one extra place at the end.
        target = torch.where(slot >= 0, slot + start, rows * length).view(-1)
        flat = torch.cat((x.view(-1, hidden), x.new_zeros(1, hidden)))
        x = flat.index_copy(0, target, seen.view(-1, hidden))[:-1].view(rows, length, hidden)
        position = batch["position"].float()[:, self.axis].transpose(1, 2)
        angles = (position * self.frequencies)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        segment = batch["segment"]
        shared = (segment == 0)[:, None, :]
        same = (segment[:, :, None] == segment[:, None, :]) | shared
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = (same & causal)[:, None]
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def at_targets(self, batch: Batch) -> Tensor:
        """Logits `[rows, targets, vocab]` at the positions that are learned."""
        hidden = self(batch)
        at = batch["at"].long().clamp_min(0)
        return self.logits(hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1])))

    def checkpoint_weights(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The parameters on the CPU, under the checkpoint's names."""
        found = {}
        for name, tensor in self.named_parameters():
            weight = tensor.detach().to("cpu", torch.float32)
            if name == "visual.patch_embed.weight":
                weight = weight.view(-1, PATCH, PATCH, 3).permute(0, 3, 1, 2)[:, :, None] / 2
                weight = weight.expand(-1, -1, 2, -1, -1)
                name = "visual.patch_embed.proj.weight"
            found[name] = weight.to(dtype).contiguous()
        return found

    def load_checkpoint(self, weights: dict[str, Tensor]) -> None:
        """Load parameters that `checkpoint_weights` returned."""
        state = {name: tensor.float() for name, tensor in weights.items()}
        patch = state.pop("visual.patch_embed.proj.weight").sum(2)
        state["visual.patch_embed.weight"] = patch.permute(0, 2, 3, 1).reshape(-1, PATCH_BYTES)
        self.load_state_dict(state)


def loss_of(network: VisionNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the losses over a batch's targets, and the number of targets."""
    logits = network.at_targets(batch)
    target = batch["target"].long()
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), ignore_index=-1, reduction="sum"
    )
    return total, (target >= 0).sum()
