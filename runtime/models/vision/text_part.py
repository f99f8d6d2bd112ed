"""Finds the text model's keys in the `config.json` of a model with images. Imports no torch."""

from __future__ import annotations

from runtime.checkpoint.json_file import Keys

# Outer keys that apply to the text model.
_SHARED = ("eos_token_id", "bos_token_id", "quantization_config")
# These keys may also be inside `text_config`; the outer value wins.
_EITHER = ("dtype", "torch_dtype", "tie_word_embeddings")


def text_part(config: Keys) -> Keys:
    """Return the keys of `text_config`, plus the outer keys that apply to the text model.

    Raises:
        StartupError: `config.json` has no `text_config`.
    """
    values = config.mapping("text_config")
    if not values:
        raise config.error("text_config", "an object")
    values = dict(values)
    for key in (*_SHARED, *_EITHER):
        if config.values.get(key) is not None:
            values[key] = config.values[key]
    for key in ("architectures", "model_type"):
        values[key] = config.values.get(key)
    return Keys(f"{config.source}: text_config", values)
