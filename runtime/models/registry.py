"""The table of architectures: the function that reads `config.json`, and the model's class.

Imports no torch. The table `FAMILIES` has one line for each architecture. A module that it names is
imported on use, so that the front process (the HTTP server) never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.checkpoint.config_keys import read_architecture, read_config
from runtime.checkpoint.gguf.config import gguf_configs
from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.preprocessor_config import read_preprocessor
from runtime.checkpoint.score_activation import read_score_activation
from runtime.checkpoint.sentence_transformers import (
    Pooling,
    read_pooling,
    read_prompts,
    read_text_limit,
)
from runtime.checkpoint.tied_head import with_head_of_files
from runtime.config.registry import load_object
from runtime.errors import StartupError
from runtime.models.decoder.stored_experts import with_experts_of_files
from runtime.models.quantization.registry import read_quantization

if TYPE_CHECKING:
    from runtime.models.model import Model

_DECODER = "runtime.models.decoder.model:DecoderForCausalLM"
_DECODER_TEXTS = "runtime.models.decoder.text_encoder:DecoderTextEncoder"
_BERT = "runtime.models.bert.model:BertModel"
_MODERNBERT = "runtime.models.modernbert.model:ModernBertModel"

_KNOWN = "runtime.models.transformers_impl.spec:known_architectures"

# The key that is added to the keys of `config.json`: the value of `--model-impl`.
_IMPL = "model_impl"


@dataclass(frozen=True)
class Family:
    """Import paths of the functions and classes that serve an architecture.

    Attributes:
        spec: function `(config, generation) -> ModelSpec` that reads `config.json`, without torch.
        model: class that runs the model, made from a spec and a `BuildContext`; needs torch.
        head: function `(spec, config) -> ModelSpec`, without torch, that changes the spec if the
            architecture has another head than its family; otherwise empty.
        texts: class that runs the model when it computes vectors of texts. Empty if `model` itself
            computes vectors or scores, or if the family cannot.
        images: whether prompts may hold images.
    """

    spec: str
    model: str
    head: str = ""
    texts: str = ""
    images: bool = False


def _decoder(family: str, read: str = "read") -> Family:
    return Family(f"runtime.models.{family}.spec:{read}", _DECODER, texts=_DECODER_TEXTS)


def _hybrid(family: str, read: str = "read") -> Family:
    return Family(f"runtime.models.{family}.spec:{read}", _DECODER)


def _own(family: str, model: str, read: str = "read") -> Family:
    folder = f"runtime.models.{family}"
    return Family(f"{folder}.spec:{read}", f"{folder}.model:{model}")


def _seeing(family: str, model: str, read: str = "read") -> Family:
    folder = f"runtime.models.{family}"
    return Family(f"{folder}.spec:{read}", f"{folder}.model:{model}", images=True)


def _headed(family: str, head: str, model: str = _DECODER_TEXTS) -> Family:
    return Family(f"runtime.models.{family}.spec:read", model, head=f"runtime.models.heads:{head}")


FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": _decoder("cohere2"),
    "DeepseekV2ForCausalLM": _decoder("deepseek", "read_v2"),
    "DeepseekV3ForCausalLM": _decoder("deepseek", "read_v3"),
    "Gemma2ForCausalLM": _decoder("gemma2"),
    "Gemma3ForCausalLM": _decoder("gemma3"),
    "Gemma3ForConditionalGeneration": _seeing("gemma3_vision", "Gemma3Vision"),
    "Gemma4ForCausalLM": _own("gemma4", "Gemma4ForCausalLM"),
    "Gemma4ForConditionalGeneration": _own("gemma4", "Gemma4ForCausalLM", "read_text_part"),
    "Glm4ForCausalLM": _decoder("glm4"),
    "Glm4MoeForCausalLM": _decoder("glm4_moe"),
    "Glm4MoeLiteForCausalLM": _decoder("glm4_moe", "read_lite"),
    "GlmForCausalLM": _decoder("glm4", "read_glm"),
    "GraniteForCausalLM": _decoder("granite"),
    "GraniteMoeForCausalLM": _decoder("granite", "read_moe"),
    "GraniteMoeHybridForCausalLM": _hybrid("granite", "read_hybrid"),
    "GptOssForCausalLM": _decoder("gpt_oss"),
    "Lfm2ForCausalLM": _hybrid("lfm2"),
    "LlamaForCausalLM": _decoder("llama"),
    "MiniMaxM2ForCausalLM": _decoder("minimax_m2"),
    "Ministral3ForCausalLM": _decoder("ministral3"),
    "Mistral3ForConditionalGeneration": _decoder("mistral3"),
    "MistralForCausalLM": _decoder("mistral"),
    "MixtralForCausalLM": _decoder("mixtral"),
    "Phi3ForCausalLM": _decoder("phi3"),
    "Qwen2ForCausalLM": _decoder("qwen2"),
    "Qwen2_5_VLForConditionalGeneration": _seeing("qwen2_5_vl", "Qwen2_5_VL"),
    "Qwen2MoeForCausalLM": _decoder("qwen2_moe"),
    "Qwen3ForCausalLM": _decoder("qwen3"),
    "Qwen3MoeForCausalLM": _decoder("qwen3_moe"),
    "Qwen3_5ForCausalLM": _hybrid("qwen3_5"),
    "Qwen3_5ForConditionalGeneration": _seeing("qwen3_5", "Qwen3_5VL", "read_vision"),
    "Qwen3_5MoeForCausalLM": _hybrid("qwen3_5", "read_moe"),
    "Qwen3_5MoeForConditionalGeneration": _seeing("qwen3_5", "Qwen3_5VL", "read_moe_vision"),
    "Qwen3NextForCausalLM": _hybrid("qwen3_next"),
    "Qwen3VLForConditionalGeneration": _seeing("qwen3_vl", "Qwen3VL"),
    "NemotronHForCausalLM": Family(
        "runtime.models.nemotron_h.spec:read",
        "runtime.models.nemotron_h.model:NemotronHForCausalLM",
    ),
    "Olmo2ForCausalLM": _decoder("olmo2"),
    "Olmo3ForCausalLM": _decoder("olmo3"),
    "OlmoeForCausalLM": _decoder("olmoe"),
    "SmolLM3ForCausalLM": _decoder("smollm3"),
    "Starcoder2ForCausalLM": _decoder("starcoder2"),
    "LlamaModel": _headed("llama", "vectors"),
    "MistralModel": _headed("mistral", "vectors"),
    "Qwen2Model": _headed("qwen2", "vectors"),
    "Qwen3Model": _headed("qwen3", "vectors"),
    "BertModel": Family("runtime.models.bert.spec:read", _BERT),
    "Gemma3TextModel": Family("runtime.models.gemma3.spec:read_texts", _DECODER_TEXTS),
    "ModernBertModel": Family("runtime.models.modernbert.spec:read", _MODERNBERT),
    "RobertaModel": Family("runtime.models.roberta.spec:read", _BERT),
    "XLMRobertaModel": Family("runtime.models.roberta.spec:read", _BERT),
    "BertForSequenceClassification": _headed("bert", "pooled_classifier", _BERT),
    "Gemma3TextForSequenceClassification": _headed("gemma3", "last_token_scores"),
    "LlamaForSequenceClassification": _headed("llama", "last_token_scores"),
    "MistralForSequenceClassification": _headed("mistral", "last_token_scores"),
    "ModernBertForSequenceClassification": _headed(
        "modernbert", "modernbert_classifier", _MODERNBERT
    ),
    "Qwen2ForRewardModel": _headed("qwen2", "reward"),
    "Qwen2ForSequenceClassification": _headed("qwen2", "last_token_scores"),
    "Qwen3ForSequenceClassification": _headed("qwen3", "last_token_scores"),
    "RobertaForSequenceClassification": _headed("roberta", "dense_classifier", _BERT),
    "XLMRobertaForSequenceClassification": _headed("roberta", "dense_classifier", _BERT),
}


ADAPTED = Family(
    "runtime.models.transformers_impl.spec:read",
    "runtime.models.transformers_impl.model:AdaptedForCausalLM",
)


def impl_override(impl: str) -> dict[str, str]:
    """Return the keys that the option `--model-impl` adds to `config.json`."""
    return {} if impl == "auto" else {_IMPL: impl}


def read_model_spec(
    folder: Path, overrides: dict[str, Any] | None = None, *, is_embedding: bool = False
) -> ModelSpec:
    """Read the spec of a model from its files.

    Args:
        folder: a local folder with `config.json` and perhaps `generation_config.json`; or a file
            that replaces `config.json`, perhaps in a folder with `generation_config.json`; or a
            GGUF file.
        overrides: top-level keys that replace those of `config.json`.
        is_embedding: whether a model that generates text is to give vectors instead.

    Raises:
        StartupError: a file is missing, an architecture or feature is not supported, or a number is
            missing or out of range; the message names the key.
    """
    config, generation = _read_words(folder, overrides)
    family = _find(
        read_architecture(config),
        str(config.values.get(_IMPL, "auto")),
        brings_code="auto_map" in config.values,
    )
    read = cast("Callable[[Keys, Keys], ModelSpec]", load_object(family.spec))
    spec = with_experts_of_files(folder, read(config, generation))
    spec = replace(spec, overrides=overrides or {})
    quantization = read_quantization(folder, config, spec)
    if quantization is not None:
        spec = replace(spec, quantization=quantization.renamed(spec.canonical))
    spec = with_head_of_files(folder, spec)
    if family.head:
        with_head = cast("Callable[[ModelSpec, Keys], ModelSpec]", load_object(family.head))
        spec = replace(
            with_head(spec, config), score_activation=read_score_activation(folder, config.values)
        )
    elif spec.gives == "tokens" and is_embedding:
        if not family.texts:
            raise StartupError(f"--is-embedding: {spec.architecture} can only generate text here.")
        spec = replace(spec, gives="vectors", pooling=Pooling("last"))
    if spec.vision is not None:
        return replace(spec, vision=read_preprocessor(folder, spec.vision))
    if spec.gives == "vectors":
        pooling = read_pooling(folder, spec.pooling.mode, spec.hidden_size)
        limit, prompts = read_text_limit(folder), read_prompts(folder)
        return replace(spec, pooling=pooling, text_limit=limit, prompts=prompts)
    return spec


def _read_words(folder: Path, overrides: dict[str, Any] | None) -> tuple[Keys, Keys]:
    if not is_gguf(folder):
        return read_config(folder, overrides)
    config, generation = gguf_configs(folder)
    return Keys(str(folder), {**config, **(overrides or {})}), Keys(str(folder), generation)


def model_class(spec: ModelSpec) -> type[Model]:
    """Return the class that runs the model of `spec`."""
    family = ADAPTED if spec.impl == "transformers" else FAMILIES[spec.architecture]
    path = family.texts if spec.gives != "tokens" and family.texts else family.model
    return cast("type[Model]", load_object(path))


def _find(architecture: str, impl: str, *, brings_code: bool) -> Family:
    if impl != "transformers" and architecture in FAMILIES:
        return FAMILIES[architecture]
    known = cast("Callable[[], frozenset[str]]", load_object(_KNOWN))
    if impl != "headrace" and architecture in known():
        return ADAPTED
    near = get_close_matches(architecture, FAMILIES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    code = " Code that comes with a model is never run." if brings_code else ""
    raise StartupError(
        f"Architecture {architecture!r} is not supported.{hint}{code}"
        f" Supported: {', '.join(FAMILIES)}."
    )
