"""The `config.json` of Gemma 3 with its vision tower (SigLIP). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt

from runtime.checkpoint.config_keys import MAX_VOCAB
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.decoder.weight_map import decoder_weights, norm_weight
from runtime.models.gemma3.spec import read as read_text
from runtime.models.vision.qwen_config import vision_keys
from runtime.models.vision.siglip_config import (
    DEFAULTS,
    SiglipVision,
    siglip_fields,
    siglip_weights,
)
from runtime.models.vision.text_part import text_part

# Tokens of the vocabulary that surround an image's tokens or stand for them.
MARKER, IMAGE_TOKEN, END_OF_IMAGE = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
BILINEAR = 2
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
_MAX_TOKENS = 2**16
# Maps name prefixes in checkpoints of `transformers` 4 and 5 to those of the weight map.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    f"model.{PROJECTOR}.": f"{PROJECTOR}.",
    f"model.{TOWER}.vision_model.": f"{TOWER}.",
    f"model.{TOWER}.": f"{TOWER}.",
    f"{TOWER}.vision_model.": f"{TOWER}.",
}


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionSpec(DecoderSpec):
    """The settings of the decoder and of its vision tower (`vision`)."""

    vision: SiglipVision

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`."""
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name

    def _list_weights(self) -> Sequence[WeightSpec]:
        width, hidden = self.vision.width, self.hidden_size
        name = f"{PROJECTOR}.mm_input_projection_weight"
        seeing = [
            *siglip_weights(self.vision, TOWER),
            norm_weight(f"{PROJECTOR}.mm_soft_emb_norm", width, zero_centered=True),
            WeightSpec(name, (width, hidden), f"{PROJECTOR}.mm_input_projection.weight"),
        ]
        ours = (replace(weight, target=f"visual.{weight.target}") for weight in seeing)
        return (*decoder_weights(self), *ours)

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed.

        The tower's pooling head is unused, and old files hold position ids.
        """
        spare = (f"{TOWER}.head.", f"{TOWER}.embeddings.position_ids")
        return name.startswith(spare) or super().is_ignored(name)


def read(config: Keys, generation: Keys) -> Gemma3VisionSpec:
    """Read the `config.json` of the text model and the tower, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    decoder = read_text(text_part(config), generation)
    known = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    known |= {"raw": config.values, "vision": _read_vision(config, decoder.vocab_size)}
    return Gemma3VisionSpec(**known)


def _read_vision(config: Keys, vocab_size: int) -> SiglipVision:
    vision = vision_keys(config, DEFAULTS)
    of_tower = siglip_fields(vision)
    patches_per_side = of_tower["side"] // of_tower["patch_size"]
    num_tokens = config.integer("mm_tokens_per_image", _MAX_TOKENS, 256)
    tokens_per_side = isqrt(num_tokens)
    if tokens_per_side**2 != num_tokens or patches_per_side % tokens_per_side:
        raise config.error(
            "mm_tokens_per_image",
            f"the square of a divisor of {patches_per_side}, the patches in a row",
        )
    token_id = config.integer("image_token_index", MAX_VOCAB, 262_144, low=0)
    if token_id >= vocab_size:
        raise config.error("image_token_index", f"below {vocab_size}, the tokens")
    return SiglipVision(
        **of_tower,
        image_token_id=token_id,
        placeholder=MARKER,
        marker=MARKER,
        expansion=f"\n\n{MARKER}{IMAGE_TOKEN}{END_OF_IMAGE}\n\n",
        image_token=IMAGE_TOKEN,
        merge_size=patches_per_side // tokens_per_side,
        num_tokens=num_tokens,
        resample=BILINEAR,
        is_bidirectional=True,
    )
