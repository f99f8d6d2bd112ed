"""Converts the keys of models with recurrent layers to those of `config.json`. No torch."""

from __future__ import annotations

from typing import Any

from runtime.checkpoint.config_keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.gguf.own_keys import OwnKeys
from runtime.checkpoint.gguf.qwen_experts import with_experts


def lfm2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of an LFM2 without experts.

    Raises:
        StartupError: a key is missing or not supported; the message has one line.
    """
    # Layers with 0 key heads have a convolution in place of attention.
    heads = keys.values.get("attention.head_count_kv")
    num_layers, known = config["num_hidden_layers"], (0, config["num_key_value_heads"])
    if not isinstance(heads, list):
        heads = [heads] * num_layers
    if len(heads) != num_layers or any(each not in known for each in heads):
        raise keys.error("attention.head_count_kv", f"0 or one number for {num_layers} layers")
    if not keys.flag("attention.causal", True):
        raise keys.error("attention.causal", "true: embedding models are not supported")
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": keys.values.get("shortconv.l_cache"),
        "conv_bias": any(keys.has(f"blk.{i}.shortconv.conv.bias") for i in range(num_layers)),
        # The file has the size of the feed-forward block, not the number that it follows from.
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }


def qwen3_next(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of Qwen3-Next.

    Raises:
        StartupError: a key is missing or not supported; the message has one line.
    """
    config = {**config, **_delta_net(keys, config)}
    return {
        **config,
        **with_experts("Qwen3NextForCausalLM", sums_to_one=True)(keys, config),
        # Old converters left the rows of q, k, v and z as they are in a checkpoint.
        "has_flat_rows": not any(name.endswith(".ssm_in.weight") for name in keys.tensors),
    }


def qwen3_5(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of a dense Qwen3.5; the errors are those of `qwen3_next`."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        **_delta_net(keys, config),
        "has_tiled_value_heads": True,
    }


def qwen3_5_moe(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of a Qwen3.5 with experts; errors are those of `qwen3_next`."""
    config = {**config, **_delta_net(keys, config)}
    return {
        **config,
        **with_experts("Qwen3_5MoeForCausalLM", sums_to_one=True)(keys, config),
        "has_tiled_value_heads": True,
    }


def _delta_net(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    # The file's number of layers includes those that predict further tokens (MTP).
    num_extra = keys.integer("nextn_predict_layers", MAX_LAYERS, 0, low=0)
    num_layers = config["num_hidden_layers"] - num_extra
    heads = keys.integer("ssm.time_step_rank", MAX_HEADS)
    inner = keys.integer("ssm.inner_size", MAX_WIDTH)
    if inner % heads:
        raise keys.error("ssm.inner_size", f"a multiple of {heads} heads")
    found: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_extra,
        "linear_conv_kernel_dim": keys.values.get("ssm.conv_kernel"),
        "linear_key_head_dim": keys.values.get("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": keys.values.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "full_attention_interval": keys.values.get("full_attention_interval", 4),
    }
    recurrent = keys.values.get("attention.recurrent_layers")
    if isinstance(recurrent, list):
        found["layer_types"] = [
            "linear_attention" if each else "full_attention" for each in recurrent[:num_layers]
        ]
    return found


def nemotron_h(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of a Nemotron-H without experts.

    Raises:
        StartupError: a key is missing or not supported; the message has one line.
    """
    num_layers = config["num_hidden_layers"]
    heads = keys.of_layers("attention.head_count_kv", num_layers, low=0)
    sizes = keys.of_layers("feed_forward_length", num_layers, low=0)
    mamba = mamba_keys(keys, config)
    return {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [
            "attention" if num_heads else "mlp" if size else "mamba"
            for num_heads, size in zip(heads, sizes, strict=True)
        ],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
        "mlp_bias": any(keys.has(f"blk.{i}.ffn_up.bias") for i in range(num_layers)),
        "attention_bias": any(keys.has(f"blk.{i}.attn_q.bias") for i in range(num_layers)),
    }


def mamba_keys(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of Mamba 2 layers, with the names that Granite uses.

    Raises:
        StartupError: a key is missing, or a number does not fit another; the message has one line.
    """
    heads = keys.integer("ssm.time_step_rank", MAX_HEADS)
    inner = keys.integer("ssm.inner_size", MAX_WIDTH)
    if inner % heads:
        raise keys.error("ssm.inner_size", f"a multiple of {heads} heads")
    layers = range(config["num_hidden_layers"])
    return {
        "layer_types": [
            "mamba" if keys.has(f"blk.{i}.ssm_in.weight") else "attention" for i in layers
        ],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.values.get("ssm.group_count"),
        "mamba_d_state": keys.values.get("ssm.state_size"),
        "mamba_d_conv": keys.values.get("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // config["hidden_size"]),
        "mamba_conv_bias": any(keys.has(f"blk.{i}.ssm_conv1d.bias") for i in layers),
        "mamba_proj_bias": any(keys.has(f"blk.{i}.ssm_in.bias") for i in layers),
    }
