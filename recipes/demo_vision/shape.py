"""Sizes of the model, and the contents of its configuration files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headrace.demo import MODEL_PATH
from recipes.demo_vision.draw import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH

TEMPLATE_PATH = Path(__file__).resolve().parent / "chat_template.jinja"
VISION_TOKENS = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class VisionShape:
    """Sizes of tower and language model.

    Attributes:
        mrope_section: how many of a head's angles belong to time, height and width; half a head in
            total.
        window: side of a window of the tower's attention, in pixels.
        full_attention: tower blocks that attend to the whole picture.
    """

    vocab_size: int = 4112
    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    mrope_section: tuple[int, int, int] = (8, 12, 12)
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tower_size: int = 128
    tower_intermediate: int = 256
    tower_depth: int = 6
    tower_heads: int = 4
    full_attention: tuple[int, ...] = (1, 3, 5)
    window: int = 112


TINY = VisionShape(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, mrope_section=(4, 6, 6), tower_size=32,
    tower_intermediate=48, tower_depth=2, tower_heads=2, full_attention=(1,),
)  # fmt: skip
"""Sizes for the test of the recipe."""


def vision_tokenizer() -> Tokenizer:
    """The bundled demo model's tokenizer, with the tokens around images and for them."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in VISION_TOKENS])
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(text)
    assert found is not None, f"the tokenizer has no {text}"
    return int(found)


def config_json(shape: VisionShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `config.json` of the checkpoint, in the layout of Qwen2.5-VL's on the hub."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": token_id(tokenizer, END_OF_TURN),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
        "vision_token_id": token_id(tokenizer, "<|vision_pad|>"),
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": {"type": "mrope", "mrope_section": list(shape.mrope_section)},
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
        "vision_config": {
            "depth": shape.tower_depth,
            "hidden_act": "silu",
            "hidden_size": shape.tower_size,
            "intermediate_size": shape.tower_intermediate,
            "num_heads": shape.tower_heads,
            "in_channels": 3,
            "in_chans": 3,
            "out_hidden_size": shape.hidden_size,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "spatial_patch_size": PATCH,
            "temporal_patch_size": 2,
            "window_size": shape.window,
            "fullatt_block_indexes": list(shape.full_attention),
            "tokens_per_second": 2,
            "model_type": "qwen2_5_vl",
        },
    }


def generation_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The `generation_config.json`: greedy, because its answers are facts about a picture."""
    end, pad = token_id(tokenizer, END_OF_TURN), token_id(tokenizer, END_OF_TEXT)
    return {
        "bos_token_id": None, "eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": True,
        "temperature": 0.1, "top_p": 0.8, "top_k": 20,
    }  # fmt: skip


def preprocessor_json() -> dict[str, Any]:
    """The `preprocessor_config.json`: pictures of 16 to 64 merged patches."""
    return {
        "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "patch_size": PATCH,
        "temporal_patch_size": 2, "merge_size": MERGE, "image_mean": list(MEAN),
        "image_std": list(STD), "resample": 3, "rescale_factor": 1 / 255, "do_resize": True,
        "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip


def tokenizer_json(template: str, max_len: int) -> dict[str, Any]:
    """The `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len,
        "bos_token": None, "eos_token": END_OF_TURN, "pad_token": END_OF_TEXT, "unk_token": None,
        "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "split_special_tokens": False, "processor_class": "Qwen2_5_VLProcessor",
        "chat_template": template,
    }  # fmt: skip
