"""What each architecture's `config.json` means: one row an architecture. Front-safe: no torch.

`runtime.models.registry` says which class runs it; a test keeps the two tables equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from runtime.errors import StartupError


@dataclass(frozen=True, kw_only=True)
class Family:
    """How an architecture differs from plain Llama.

    Attributes:
        biases: `never`; `qkv` always on q, k and v; or `keyed` by `attention_bias`, on o too.
        has_mlp_bias: whether `mlp_bias` is read.
        qk_norm: whether heads of q and k are normalised.
        head_dim: when the key is absent; `None` for `hidden_size / num_attention_heads`.
        window: whether `sliding_window` counts `never`, `always`, or is `switched` on by
            `use_sliding_window` for the layers from `max_window_layers` on.
        default_window: when `sliding_window` is absent (not when it is null).
    """

    biases: Literal["never", "qkv", "keyed"] = "never"
    has_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["never", "always", "switched"] = "never"
    default_window: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(biases="keyed", has_mlp_bias=True),
    "MistralForCausalLM": Family(window="always", default_window=4096),
    "Qwen2ForCausalLM": Family(biases="qkv", window="switched", default_window=4096),
    "Qwen3ForCausalLM": Family(
        biases="keyed", qk_norm=True, head_dim=128, window="switched", default_window=4096
    ),
}


def find_family(architecture: str, *, brings_code: bool) -> Family:
    """Return the row of `architecture`.

    Args:
        architecture: class name in `config.json`.
        brings_code: whether the folder has an `auto_map`, that is Python of its own.

    Raises:
        StartupError: not supported; names what is, and the nearest.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    near = get_close_matches(architecture, FAMILIES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    code = " Code that comes with a model is never run." if brings_code else ""
    raise StartupError(
        f"Architecture {architecture!r} is not supported.{hint}{code}"
        f" Supported: {', '.join(FAMILIES)}."
    )
