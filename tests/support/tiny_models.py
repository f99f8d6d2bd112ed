"""Writes folders of tiny random Hugging Face models, one per variant, with `transformers`.

`tiny_model("qwen3")` returns a folder with weights, `config.json`, `generation_config.json`, a
byte-level BPE tokenizer and a ChatML template. Each folder is created once per process. It is in a
temporary folder, which is removed when the process ends.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = range(3)

_TEXT = (
    "A headrace is the channel that brings water to a mill wheel; the tailrace takes it away. "
    "The miller opens the gate, the wheel turns, and the stones grind wheat, barley and oats. "
    "Numbers such as 0 1 2 3 4 5 6 7 8 9 and signs such as {}[]()<>\"'`,.;:!?+-*/=_ are known. "
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Où est la rivière ? "
    "def wheel(water: float) -> float:\n    return water * 0.85\n"
)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": IM_END_ID,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyModel:
    """A variant of a model.

    Attributes:
        architecture: name of its class in `transformers`.
        options: keys of its configuration, which replace the common small sizes.
        dtype: data type of the stored weights.
        max_shard_size: size of the weight files, such as `40KB`; `None` for a single file.
        generation: keys of `generation_config.json` besides the end-of-sequence id.
    """

    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    max_shard_size: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_UPPER_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

# The windows are shorter than most prompts. The scale of attention scores is that of another head
# size.
_GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaForCausalLM"),
    "llama_tied": TinyModel("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_biased": TinyModel("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": TinyModel("LlamaForCausalLM", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama_llama3": TinyModel("LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear": TinyModel(
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama_dynamic": TinyModel(
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama_sharded": TinyModel("LlamaForCausalLM", max_shard_size="200KB"),
    "llama_float16": TinyModel("LlamaForCausalLM", dtype="float16"),
    "mistral": TinyModel("MistralForCausalLM", {"sliding_window": None}),
    "mistral_window": TinyModel("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": TinyModel("Qwen2ForCausalLM"),
    "qwen2_yarn": TinyModel("Qwen2ForCausalLM", {"rope_parameters": _YARN_ROPE}),
    "qwen2_window": TinyModel("Qwen2ForCausalLM", _UPPER_WINDOW),
    "qwen3": TinyModel(
        "Qwen3ForCausalLM",
        {"head_dim": 32, "tie_word_embeddings": True},
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
    ),
    "qwen3_untied": TinyModel("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "qwen3_bfloat16": TinyModel(
        "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}, dtype="bfloat16"
    ),
    "gemma3": TinyModel(
        "Gemma3ForCausalLM",
        {
            **_GEMMA3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _GEMMA3_ROPES,
        },
    ),
    # The sixth of seven layers has no window.
    "gemma3_pattern": TinyModel(
        "Gemma3ForCausalLM", {**_GEMMA3, "num_hidden_layers": 7}, max_shard_size="200KB"
    ),
    "gemma3_untied": TinyModel(
        "Gemma3ForCausalLM",
        {
            "head_dim": 256,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
        },
    ),
    # The first of three layers has no experts.
    "qwen2_moe": TinyModel(
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe": TinyModel(
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": TinyModel("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 8}),
    "gemma3_bfloat16": TinyModel("Gemma3ForCausalLM", _GEMMA3, dtype="bfloat16"),
}


_LINEAR_HEADS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 80,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "embedding_multiplier": 0.25,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_SHARED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

# Variants whose layers keep recurrent states.
TINY_HYBRIDS: dict[str, TinyModel] = {
    "lfm2": TinyModel(
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_bias": True,
            "block_multiple_of": 32,
            "tie_word_embeddings": True,
        },
    ),
    # Heads of keys and values differ in number and size. RoPE rotates a quarter of each head.
    "qwen3_next": TinyModel(
        "Qwen3NextForCausalLM",
        {**_LINEAR_HEADS, **_SHARED_EXPERTS, "mlp_only_layers": [0]},
    ),
    # Attention of one model rotates; heads of the other one are in two groups, with a norm of each.
    "granite_hybrid": TinyModel(
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
        },
    ),
    "granite_hybrid_moe": TinyModel(
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_n_groups": 2,
        },
    ),
    # `transformers` bounds the time steps of prompts by `time_step_min`, but not those of answers.
    "nemotron_h": TinyModel(
        "NemotronHForCausalLM",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
                "linear_attention",
            ],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 4,
            "time_step_min": 1e-30,
        },
    ),
    "qwen3_5": TinyModel("Qwen3_5ForCausalLM", _LINEAR_HEADS),
    "qwen3_5_moe": TinyModel("Qwen3_5MoeForCausalLM", {**_LINEAR_HEADS, **_SHARED_EXPERTS}),
}


@cache
def tiny_model(name: str) -> Path:
    """Return the folder of the variant `name`, created on first use; do not write into it."""
    return write_tiny(name, {**TINY_MODELS, **TINY_HYBRIDS}[name])


def write_tiny(name: str, variant: TinyModel) -> Path:
    """Create the folder of a variant."""
    import torch
    import transformers

    assert_version_is_safe()
    folder = tiny_root() / name
    model_class = getattr(transformers, variant.architecture)
    text = variant.options.get("text_config")
    options = {**_SMALL, **variant.options}
    if text is not None:
        # For a model that takes images, the small sizes are those of its text model.
        options = {**variant.options, "text_config": {**_SMALL, **text}}
    # The options are copied, because transformers changes dictionaries that it receives.
    model = model_class(model_class.config_class(**json.loads(json.dumps(options))))
    zero_centered = variant.architecture.startswith(("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5"))
    randomise(model, seed=sum(name.encode()), norm=0.0 if zero_centered else 1.0)
    model = model.to(getattr(torch, variant.dtype))
    model.generation_config.update(eos_token_id=[IM_END_ID, ENDOFTEXT_ID], **variant.generation)
    shards = {} if variant.max_shard_size is None else {"max_shard_size": variant.max_shard_size}
    model.save_pretrained(folder, **shards)
    write_tokenizer(folder)
    return folder


TINY_BERTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "bert_tanh": {"hidden_act": "gelu_new", "type_vocab_size": 1},
}


def tiny_bert(name: str, pooling: str = "mean", *, normalize: bool = True) -> Path:
    """Return the folder of a small BERT, in the form of sentence-transformers."""
    return _tiny_bert(name, pooling, normalize)


@cache
def _tiny_bert(name: str, pooling: str, normalize: bool) -> Path:
    from transformers import BertConfig, BertModel

    folder = tiny_root() / f"{name}-{pooling}-{normalize}"
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    model = BertModel(BertConfig(**options, **TINY_BERTS[name]))
    randomise(model, seed=sum(name.encode()), norm=1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_pooling(folder, pooling, normalize=normalize)
    return folder


def write_pooling(folder: Path, pooling: str, *, normalize: bool = True) -> None:
    """Write sentence-transformers' files to a folder of a model with vectors of size 32."""
    kinds = ["Transformer", "Pooling", "Normalize"] if normalize else ["Transformer", "Pooling"]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if kind == "Transformer" else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    flags = {f"pooling_mode_{value}": key == pooling for key, value in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **flags})
    )


def copy_of(name: str, target: Path) -> Path:
    """Copy the variant `name` to `target`, for tests that change or break it."""
    shutil.copytree(tiny_model(name), target)
    return target


def other_weights(name: str, target: Path, seed: int = 1) -> Path:
    """Copy the variant `name` to `target`, with other random weights of the same shapes."""
    return changed_weights(tiny_model(name), target, seed)


def changed_weights(folder: Path, target: Path, seed: int = 1) -> Path:
    """Copy a folder to `target`, with other random weights of the same shapes."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(seed)
    for path in target.glob("*.safetensors"):
        tensors = {
            key: tensor + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            for key, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return target


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object in a file; the value `...` removes a key."""
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            values.pop(key, None)
        else:
            values[key] = value
    path.write_text(json.dumps(values))


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, with at most `VOCAB_SIZE` ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "chat_template": CHATML_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _SMALL["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def assert_version_is_safe() -> None:
    """Check that `transformers` does not take our `kernels` package for the one on PyPI.

    `transformers` looks at the version of the distribution that has the package `kernels`. It takes
    versions 0.10 to 0.19 for the package on PyPI.
    """
    try:
        major, minor = (int(part) for part in version("headrace").split(".")[:2])
    except PackageNotFoundError:
        return
    assert (major, minor) < (0, 10) or (major, minor) > (0, 19), "see docs: versions 0.10 to 0.19"


@cache
def tiny_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="headrace-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    text: str = tokenizer.to_str()
    return text


_NORMS = ("norm", "norm_1", "norm_2", "norm_f")


def randomise(model: Any, seed: int, norm: float) -> None:
    """Give all parameters random values that affect the output; norms get values near `norm`.

    `transformers` starts with norms that have no effect, with biases of zero, and with logits so
    small that the largest two are nearly equal. Here each matrix keeps the magnitude of its input,
    and the output head spreads the logits. So greedy tokens do not depend on rounding.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.empty(parameter.shape).normal_(generator=generator)
        if name.lower().endswith(tuple(f"{each}.weight" for each in _NORMS)):
            parameter.data.copy_(norm + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.data.copy_(0.2 * noise)
        else:
            gain = 4.0 if "lm_head" in name or "embed" in name else 1.0
            parameter.data.copy_(gain * noise / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        # These values are zero otherwise, as if experts were chosen by their scores alone.
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2, generator=generator)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.0, generator=generator)
