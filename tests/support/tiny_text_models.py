"""Tiny random embedding and scoring models, and their results in `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import (
    VOCAB_SIZE,
    edit_json,
    randomise,
    tiny_root,
    write_pooling,
    write_tokenizer,
)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_DECODER = {"num_key_value_heads": 2, "head_dim": 16}
_LABELS = {"id2label": {0: "bad", 1: "fair", 2: "good"}}
_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {**_DECODER, "sliding_window": 9, "query_pre_attn_scalar": 24, "layer_types": _WINDOWED}


@dataclass(frozen=True)
class TextModel:
    """A variant of a model.

    Attributes:
        architecture: name of its class in `transformers`.
        options: keys of its configuration, which replace the common small sizes.
        saved_as: the architecture that its configuration names, if it is another one.
        pooling: how a text's vector is made from those of its tokens; empty for a scoring model.
        is_embedding: whether the server needs `--is-embedding`.
    """

    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)
    saved_as: str = ""
    pooling: str = ""
    is_embedding: bool = False


TEXT_MODELS: dict[str, TextModel] = {
    "bert_pretrained": TextModel("BertForPreTraining", saved_as="BertModel", pooling="mean"),
    "roberta": TextModel("RobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}, pooling="cls"),
    "xlm_roberta": TextModel("XLMRobertaModel", {"pad_token_id": 1}, pooling="cls"),
    "modernbert": TextModel("ModernBertModel", {"local_attention": 10}, pooling="mean"),
    "modernbert_biased": TextModel(
        "ModernBertModel",
        {"local_attention": 6, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
        pooling="cls",
    ),
    "qwen3": TextModel("Qwen3ForCausalLM", _DECODER, pooling="last", is_embedding=True),
    "qwen3_bare": TextModel(
        "Qwen3Model", _DECODER, saved_as="Qwen3ForCausalLM", pooling="last", is_embedding=True
    ),
    "qwen2": TextModel(
        "Qwen2ForCausalLM", {"num_key_value_heads": 2}, pooling="mean", is_embedding=True
    ),
    "mistral": TextModel("MistralModel", {**_DECODER, "sliding_window": 8}, pooling="last"),
    "gemma3": TextModel(
        "Gemma3TextModel", {**_GEMMA, "use_bidirectional_attention": True}, pooling="mean"
    ),
    "gemma3_causal": TextModel("Gemma3TextModel", _GEMMA, pooling="last"),
    "bert_scores": TextModel("BertForSequenceClassification", _LABELS),
    "roberta_scores": TextModel("RobertaForSequenceClassification", {**_LABELS, "pad_token_id": 1}),
    "xlm_roberta_scores": TextModel(
        "XLMRobertaForSequenceClassification", {"id2label": {0: "LABEL_0"}, "pad_token_id": 1}
    ),
    "modernbert_scores": TextModel(
        "ModernBertForSequenceClassification", {**_LABELS, "local_attention": 10}
    ),
    "modernbert_mean_scores": TextModel(
        "ModernBertForSequenceClassification",
        {**_LABELS, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "llama_scores": TextModel(
        "LlamaForSequenceClassification", {**_DECODER, "id2label": {0: "reward"}}
    ),
    "qwen3_scores": TextModel("Qwen3ForSequenceClassification", {**_DECODER, **_LABELS}),
}
VECTORS = [name for name, variant in TEXT_MODELS.items() if variant.pooling]
SCORES = [name for name, variant in TEXT_MODELS.items() if not variant.pooling]


@cache
def text_model(name: str) -> Path:
    """Return the folder of the variant `name`, created on first use; do not write into it."""
    import transformers

    variant = TEXT_MODELS[name]
    folder = tiny_root() / f"text-{name}"
    model_class = getattr(transformers, variant.architecture)
    # The options are copied, because transformers changes dictionaries that it receives.
    options = json.loads(json.dumps({**_SMALL, **variant.options}))
    if "id2label" in options:
        options["id2label"] = {int(key): label for key, label in options["id2label"].items()}
    model = model_class(model_class.config_class(**options))
    zero_centered = variant.architecture.startswith("Gemma")
    randomise(model, seed=sum(name.encode()), norm=0.0 if zero_centered else 1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if variant.saved_as:
        edit_json(folder / "config.json", architectures=[variant.saved_as])
    if variant.pooling:
        write_pooling(folder, variant.pooling)
    return folder


def add_dense(folder: Path, target: Path, sizes: list[int]) -> Path:
    """Copy `folder` to `target`; add a dense tanh layer after the pooling for each of `sizes`."""
    from safetensors.torch import save_file

    shutil.copytree(folder, target)
    modules = json.loads((target / "modules.json").read_text())
    generator = torch.Generator().manual_seed(len(sizes))
    before = 32
    for index, size in enumerate(sizes, 2):
        name = f"{index}_Dense"
        (target / name).mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        numbers = {"in_features": before, "out_features": size, "bias": True}
        (target / name / "config.json").write_text(
            json.dumps({**numbers, "activation_function": activation})
        )
        weights = {
            "linear.weight": torch.empty(size, before).normal_(generator=generator),
            "linear.bias": torch.empty(size).normal_(generator=generator),
        }
        save_file(weights, target / name / "model.safetensors")
        modules.insert(
            index, {"idx": index, "name": name, "path": name, "type": "sentence_transformers.Dense"}
        )
        before = size
    (target / "modules.json").write_text(json.dumps(modules))
    return target


@cache
def _their_model(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def their_hidden(folder: Path, text: list[int]) -> torch.Tensor:
    """Return the last layer's output in `transformers`, `[num_tokens, hidden_size]`."""
    with torch.inference_mode():
        hidden: torch.Tensor = _their_model(folder)(torch.tensor([text])).last_hidden_state[0]
    return hidden


def their_vectors(
    folder: Path, texts: list[list[int]], pooling: str, *, normalize: bool = True
) -> torch.Tensor:
    """Return the vectors of texts by `transformers`, `[num_texts, hidden_size]` float32."""
    found = []
    for text in texts:
        hidden = their_hidden(folder, text)
        pick = {"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}
        found.append(pick[pooling])
    vectors = torch.stack(found)
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def their_scores(folder: Path, texts: list[list[int]], **inputs: Any) -> torch.Tensor:
    """Return the scores of texts by `transformers`, `[num_texts, num_labels]` float32."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = [model(torch.tensor([text]), **inputs).logits[0] for text in texts]
    return torch.stack(rows)
