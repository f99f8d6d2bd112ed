"""The Qwen3 architecture in plain torch, for training; parameter names are transformers'."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


TINY = Shape(1024, 64, 128, 2, 4, 2, 16, 512)
"""Sizes for the test of the recipe."""


def config_json(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """The `config.json` of the checkpoint."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        # transformers 5 reads rope_parameters, older versions and other engines rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_hidden_layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


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


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dim = shape.num_attention_heads, shape.head_dim
        self.kv_heads = shape.num_key_value_heads
        hidden = shape.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = _RmsNorm(self.dim, shape.rms_norm_eps)
        self.k_norm = _RmsNorm(self.dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        # Right padding needs no mask: no real position attends to it.
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, wide = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)
        self.input_layernorm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = _RmsNorm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """A causal language model with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = _Trunk(shape)
        self.compute_dtype = compute_dtype
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-half
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deep = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 0.02 / (2 * shape.num_hidden_layers) ** 0.5 if deep else 0.02
            nn.init.normal_(parameter, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, len, vocab]` of `ids` `[batch, len]`."""
        length = ids.shape[1]
        x = self.model.embed_tokens(ids).to(self.compute_dtype)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
