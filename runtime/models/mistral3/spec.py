"""The settings of Mistral's models that take images, for text alone. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.ministral3.spec import read as read_ministral3
from runtime.models.mistral.spec import read as read_mistral
from runtime.models.vision.text_part import text_part

_READERS = {"mistral": read_mistral, "ministral3": read_ministral3}
# Maps name prefixes in files of `transformers` 4 and 5 to those of the weight map.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_NOT_LOADED = tuple(
    f"{prefix}{part}."
    for part in ("vision_tower", "multi_modal_projector")
    for prefix in ("", "model.")
)


@dataclass(frozen=True, kw_only=True)
class Mistral3Spec(DecoderSpec):
    """The settings of the decoder; the model's image tower is not loaded."""

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`."""
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return super().canonical(name)

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed."""
        return name.startswith(_NOT_LOADED) or super().is_ignored(name)


def read(config: Keys, generation: Keys) -> Mistral3Spec:
    """Read the text model's settings; requests with images are refused later.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    kind = config.mapping("text_config").get("model_type", "mistral")
    text = text_part(config)
    if kind not in _READERS:
        inner = Keys(text.source, config.mapping("text_config"))
        raise inner.error("model_type", " or ".join(map(repr, _READERS)))
    # The default is that of `transformers`. If the files have a separate output head,
    # `with_head_of_files` finds it.
    text.values.setdefault("tie_word_embeddings", True)
    decoder = _READERS[kind](text, generation)
    known = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    return Mistral3Spec(**{**known, "raw": config.values})
