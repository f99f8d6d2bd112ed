"""The keys that the `config.json` of Qwen2.5-VL, Qwen3-VL and Qwen3.5 share. Imports no torch.

The tower's keys are in `vision_config`. The text model's keys are at the top level of the file, or
in `text_config`, where `transformers` 5 writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.checkpoint.config_keys import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.checkpoint.vision_spec import VisionSpec
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.decoder.weight_map import decoder_weights

IMAGE_TOKEN = "<|image_pad|>"  # a token of the vocabulary
IMAGE_TEXT = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
# Defaults of the processor that both families use.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
BICUBIC = 3
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
# Keys that some files have at the top level and others in `text_config`.
_EITHER = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")
_MAX_SIDE = 2**10
# Maps name prefixes in files of later versions to those of the model's own checkpoints.
_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}


@dataclass(frozen=True, kw_only=True)
class QwenVision(VisionSpec):
    """The sizes and other settings of a vision tower.

    Attributes:
        depth: number of blocks.
        width: elements of a patch's vector.
        num_heads: heads of a block's attention.
        intermediate_size: intermediate size of a block's feed-forward part.
        frames: number of frames that the product of a patch takes. A still image is repeated.
        theta: base of the rotary embedding by rows and columns.
    """

    depth: int
    width: int
    num_heads: int
    intermediate_size: int
    frames: int
    theta: float

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.width // self.num_heads

    @property
    def merged_width(self) -> int:
        """Elements of all patches that are merged into one vector."""
        return self.width * self.merge_size**2


@dataclass(frozen=True, kw_only=True)
class QwenVLSpec(DecoderSpec):
    """The settings of a decoder with a vision tower.

    Attributes:
        vision: settings of the tower.
        tower_weights: the tower's tensors in a checkpoint.
    """

    vision: QwenVision
    tower_weights: tuple[WeightSpec, ...]

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`."""
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name

    def _list_weights(self) -> Sequence[WeightSpec]:
        return (*decoder_weights(self), *self.tower_weights)

    @property
    def image_cell(self) -> int:
        """Side of the square of pixels that becomes one vector; see `ModelSpec`."""
        return self.vision.patch_size * self.vision.merge_size

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed; see `ModelSpec`."""
        return name == "visual.rotary_pos_emb.inv_freq" or super().is_ignored(name)


def text_keys(config: Keys, defaults: Mapping[str, Any]) -> Keys:
    """Return the text model's keys, with a family's defaults for absent keys.

    The keys are in `text_config`, or in `config` itself.

    Raises:
        StartupError: a part is not an object.
    """
    nested = config.mapping("text_config")
    values = {**defaults, **(nested or config.values)}
    for key in _EITHER:
        if values.get(key) is None:
            values[key] = config.values.get(key)
    values["architectures"] = config.values.get("architectures")
    values["model_type"] = config.values.get("model_type")
    values["tie_word_embeddings"] = config.flag("tie_word_embeddings", False) or Keys(
        config.source, nested
    ).flag("tie_word_embeddings", False)
    for key in ("rope_scaling", "rope_parameters"):
        rope = Keys(config.source, values).mapping(key)
        # "mrope" is the default rotary embedding with positions on several axes; see
        # `read_sections`.
        kinds = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
        if kinds:
            values[key] = {**rope, **kinds}
    return Keys(config.source, values)


def read_sections(text: Keys, default: Sequence[int], rotary_dim: int) -> tuple[int, int, int]:
    """Return how many of a head's rotation angles use the time, the row and the column.

    Args:
        text: the keys of the text model.
        default: the three numbers if the file has none.
        rotary_dim: elements of a head that rotate.

    Raises:
        StartupError: the three numbers do not add up to half of these elements.
    """
    found: Any = default
    for key in ("rope_parameters", "rope_scaling"):
        found = text.mapping(key).get("mrope_section") or found
    keys, half = Keys(text.source, {"mrope_section": found}), rotary_dim // 2
    if not isinstance(found, list | tuple) or len(found) != 3 or sum(map(_count, found)) != half:
        raise keys.error("mrope_section", f"3 numbers that make {half}, half of a head")
    time, row, column = found
    return time, row, column


def tower_fields(config: Keys, vision: Keys, spec: DecoderSpec) -> dict[str, Any]:
    """Return the fields of a `QwenVision` that `vision_config` sets.

    Args:
        config: keys of the whole `config.json`.
        vision: keys of its `vision_config`, with the family's defaults for absent keys.
        spec: the decoder's spec.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    width = vision.integer("hidden_size", MAX_WIDTH)
    num_heads = vision.integer("num_heads", MAX_HEADS)
    if width % (4 * num_heads):
        raise vision.error("hidden_size", f"a multiple of 4 for each of {num_heads} heads")
    for key in ("in_channels", "in_chans"):
        if vision.integer(key, 2**10, 3) != 3:
            raise vision.error(key, "3")
    if vision.integer("out_hidden_size", MAX_WIDTH, spec.hidden_size) != spec.hidden_size:
        raise vision.error("out_hidden_size", f"the decoder's {spec.hidden_size}")
    rope = Keys(f"{vision.source}: rope_parameters", vision.mapping("rope_parameters"))
    token_id = config.integer("image_token_id", MAX_VOCAB, 151_655, low=0)
    if token_id >= spec.vocab_size:
        raise config.error("image_token_id", f"below {spec.vocab_size}, the tokens")
    return {
        "image_token_id": token_id,
        "placeholder": IMAGE_TEXT,
        "marker": IMAGE_TOKEN,
        "expansion": IMAGE_TOKEN,
        "image_token": IMAGE_TOKEN,
        "resizing": "patches",
        "patch_size": vision.integer("patch_size", _MAX_SIDE),
        "merge_size": vision.integer("spatial_merge_size", _MAX_SIDE),
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "resample": BICUBIC,
        "mean": MEAN,
        "std": STD,
        "depth": vision.integer("depth", MAX_LAYERS),
        "width": width,
        "num_heads": num_heads,
        "intermediate_size": vision.integer("intermediate_size", MAX_WIDTH),
        "frames": vision.integer("temporal_patch_size", 16),
        "theta": rope.number("rope_theta", 1.0, 1e12, 10_000.0),
    }


def vision_keys(config: Keys, defaults: Mapping[str, Any]) -> Keys:
    """Return the keys of `vision_config`, with a family's defaults for absent keys.

    Raises:
        StartupError: `config.json` has no `vision_config`.
    """
    values = config.mapping("vision_config")
    if not values:
        raise config.error("vision_config", "an object")
    given = {key: value for key, value in values.items() if value is not None}
    return Keys(f"{config.source}: vision_config", {**defaults, **given})


def block_indices(keys: Keys, key: str, depth: int) -> tuple[int, ...]:
    """Return the indices of a tower's blocks that the list under `key` names, in ascending order.

    Raises:
        StartupError: the value is not an ascending list, or it names blocks that do not exist.
    """
    found = keys.values.get(key)
    blocks = [_count(each) for each in found] if isinstance(found, list | tuple) else [depth]
    if blocks != sorted(set(blocks)) or any(block >= depth for block in blocks):
        raise keys.error(key, f"an ascending list of blocks from 0 to {depth - 1}")
    return tuple(blocks)


def _count(value: Any) -> int:
    """Return `value` if it is a count, and otherwise a number that is larger than any count."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else MAX_VOCAB


def tower_linear(name: str, out_size: int, in_size: int) -> list[WeightSpec]:
    """Return the specs of a tower's matrix and of its bias."""
    return [
        WeightSpec(f"{name}.weight", (out_size, in_size), f"{name}.weight"),
        WeightSpec(f"{name}.bias", (out_size,), f"{name}.bias", kind="bias"),
    ]


def tower_norm(name: str, size: int, *, bias: bool) -> list[WeightSpec]:
    """Return the specs of a tower's norm: the weight, and the bias if `bias` is set."""
    weights = [WeightSpec(f"{name}.weight", (size,), f"{name}.weight", kind="norm")]
    if bias:
        weights.append(WeightSpec(f"{name}.bias", (size,), f"{name}.bias", kind="bias"))
    return weights


def patch_weight(vision: QwenVision) -> WeightSpec:
    """Return the spec of the patches' matrix, which checkpoints store as a convolution."""
    name = "visual.patch_embed.proj.weight"
    side = vision.patch_size
    return WeightSpec(name, (vision.width, 3, vision.frames, side, side), name)


def attention_weights(vision: QwenVision, block: str) -> list[WeightSpec]:
    """Return the specs of the weights of a block's attention; checkpoints fuse q, k and v."""
    width = vision.width
    qkv = tower_linear(f"{block}.attn.qkv", 3 * width, width)
    return [*qkv, *tower_linear(f"{block}.attn.proj", width, width)]
