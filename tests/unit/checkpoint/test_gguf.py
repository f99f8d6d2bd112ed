"""The header of GGUF files: accepted fields, refusals, and the cost of hostile files."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from runtime.checkpoint.check import check_model_folder
from runtime.checkpoint.gguf.config import gguf_configs
from runtime.checkpoint.gguf.files import find_gguf
from runtime.checkpoint.gguf.header import read_gguf
from runtime.checkpoint.hub import resolve_model_folder
from runtime.errors import StartupError
from runtime.models.registry import read_model_spec
from runtime.text.tokenizer import Tokenizer
from tests.support.gguf_models import write_gguf
from tests.support.tiny_models import tiny_model


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    shape = b"".join(struct.pack("<Q", dim) for dim in dims)
    return text(name) + struct.pack("<I", len(dims)) + shape + struct.pack("<IQ", kind, offset)


def header(
    tensors: int, keys: int, *rest: bytes, version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(rest) + bytes(64)


HUGE = 2**63
ARRAY, STRING, UINT32 = 9, 8, 4
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "another format": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "a pointer": (b"version https://git-lfs", "Git LFS pointer"),
    "old version": (header(0, 0, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "absurd tensors": (header(HUGE, 0), "elements of tensors"),
    "absurd keys": (header(0, HUGE), "elements of keys"),
    "more keys than bytes": (header(0, 60_000), "elements of keys"),
    "absurd key": (header(0, 1, struct.pack("<Q", HUGE)), "a key would be"),
    "absurd text": (header(0, 1, key("a", STRING, struct.pack("<Q", HUGE))), "a would be"),
    "text beyond the end": (header(0, 1, key("a", STRING, struct.pack("<Q", 9999))), "truncated"),
    "absurd array": (
        header(0, 1, key("a", ARRAY, struct.pack("<IQ", UINT32, HUGE))), "elements of a",
    ),
    "absurd array of texts": (
        header(0, 1, key("a", ARRAY, struct.pack("<IQ", STRING, 2**40))), "elements of a",
    ),
    "absurd text in an array": (
        header(0, 1, key("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))), "truncated",
    ),
    "deep array": (
        header(0, 1, key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 40)), "an array in an array",
    ),
    "unknown type of a key": (header(0, 1, key("a", 77, b"")), "of type 77"),
    "unknown type in an array": (
        header(0, 1, key("a", ARRAY, struct.pack("<IQ", 77, 1))), "array of type 77",
    ),
    "a key twice": (header(0, 2, key("a", UINT32, bytes(4)), key("a", UINT32, bytes(4))), "twice"),
    "no dimension": (header(1, 0, tensor(dims=())), "0 dimensions"),
    "many dimensions": (header(1, 0, tensor(dims=(1,) * 9)), "9 dimensions"),
    "a dimension of nothing": (header(1, 0, tensor(dims=(0,))), "is [0] of F32"),
    "absurd dimensions": (header(1, 0, tensor(dims=(2**62, 2**62))), "of F32"),
    "absurd offset": (header(1, 0, tensor(offset=HUGE)), "at byte"),
    "a tensor beyond the end": (header(1, 0, tensor(dims=(4096,))), "truncated"),
    "half a block": (header(1, 0, tensor(dims=(33,), kind=2)), "[33] of Q4_0"),
    "unread type": (header(1, 0, tensor(kind=19)), "IQ1_S"),
    "unknown type": (header(1, 0, tensor(kind=999)), "number 999"),
    "a tensor twice": (header(2, 0, tensor(), tensor()), "twice"),
    "alignment": (header(0, 1, key("general.alignment", UINT32, bytes(4))), "general.alignment"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_one_line_and_no_memory(name: str, tmp_path: Path) -> None:
    data, expected = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(StartupError) as caught:
            read_gguf(path)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = caught.value.message
    assert expected in message
    assert "\n" not in message
    assert len(message) < 500
    assert taken < 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    write_gguf(tiny_model("llama"), path, lambda name: "Q8_0")
    return path


def read_all(path: Path) -> None:
    spec = read_model_spec(path)
    check_model_folder(path, spec)


def test_a_file_cut_anywhere_is_one_line(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    path = tmp_path / "model.gguf"
    for length in [*range(0, 3000, 37), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(StartupError) as caught:
            read_all(path)
        assert "\n" not in caught.value.message


def test_changed_bytes_raise_nothing_else(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    path = tmp_path / "model.gguf"
    source = random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(source.randint(1, 8)):
            changed[source.randrange(3000)] = source.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(StartupError):
            read_all(path)


def test_spec_and_types(model: Path) -> None:
    spec, folder = read_model_spec(model), read_model_spec(tiny_model("llama"))
    for name in ("architecture", "vocab_size", "hidden_size", "num_layers", "num_kv_heads", "rope"):
        assert getattr(spec, name) == getattr(folder, name), name
    assert spec.quantization is not None
    assert "Q8_0" in spec.quantization.description
    assert spec.num_parameters == folder.num_parameters
    # 34 bytes for 32 numbers, and norms in float32.
    assert spec.weight_bytes(4, "cpu") < folder.weight_bytes(4, "cpu") * 0.28
    assert spec.weight_bytes(2, "cuda") == folder.weight_bytes(2, "cuda")


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(0, 1, key("general.architecture", STRING, text("mamba"))) + bytes(99))
    with pytest.raises(StartupError, match="no tensors"):
        read_model_spec(path)
    one = header(1, 1, key("general.architecture", STRING, text("mamba")), tensor()) + bytes(99)
    path.write_bytes(one)
    with pytest.raises(StartupError, match="'mamba' is not supported"):
        read_model_spec(path)


def written(path: Path, architecture: str, *, num_layers: int = 2) -> gguf.GGUFWriter:
    """A file's writer with the keys that every architecture has, and with embeddings alone."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
    return writer


def config_of(writer: gguf.GGUFWriter, path: Path) -> dict[str, Any]:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_configs(path)[0]


@pytest.mark.parametrize(
    ("architecture", "num_layers", "expected"),
    [("gemma2", 26, 32), ("gemma2", 46, 16), ("gemma3", 46, 32), ("gemma3", 62, 16)],
)
def test_only_the_largest_gemma_scales_by_its_width(
    architecture: str, num_layers: int, expected: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = written(path, architecture, num_layers=num_layers)
    assert config_of(writer, path)["query_pre_attn_scalar"] == expected


def test_granite_without_its_factors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = config_of(written(path, "granite"), path)
    assert config["attention_multiplier"] == 32**-0.5
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        assert config[key] == 1.0


def test_a_message_of_gpt_oss_does_not_end_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = written(path, "gpt-oss")
    writer.add_token_list(["<|return|>", "<|end|>", "<|endoftext|>", "<|call|>"])
    writer.add_eos_token_id(0)
    assert config_of(writer, path)["eos_token_id"] == [0, 2, 3]


def test_a_tool_call_of_glm_ends_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = written(path, "glm4")
    writer.add_rope_dimension_count(16)
    writer.add_token_list(["<|endoftext|>", "<|user|>", "<|observation|>"])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    config = config_of(writer, path)
    assert config["eos_token_id"] == [0, 1, 2]
    assert config["partial_rotary_factor"] == 0.5


def test_a_gpt_oss_file_without_scaling_is_not_stretched(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = config_of(written(path, "gpt-oss"), path)
    assert config["rope_scaling"]["rope_type"] == "default"


def deepseek(path: Path, num_experts: int) -> gguf.GGUFWriter:
    """A DeepSeek's writer as an old converter wrote it: expanded heads, no groups of experts."""
    writer = written(path, "deepseek2")
    writer.add_expert_count(num_experts)
    writer.add_rope_dimension_count(8)
    return writer


@pytest.mark.parametrize(("num_experts", "groups"), [(64, (1, 1)), (160, (8, 3)), (256, (8, 4))])
def test_a_deepseek_file_without_groups(
    num_experts: int, groups: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    config = config_of(deepseek(path, num_experts), path)
    assert (config["n_group"], config["topk_group"]) == groups
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert config["topk_method"] == ("greedy" if groups == (1, 1) else "group_limited_greedy")
    assert config["qk_nope_head_dim"] == 24


def with_two_bases(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_float32("olmo2.rope.freq_base_swa", 5000.0)


def with_third_scoring(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(8)
    writer.add_uint32("deepseek2.expert_gating_func", 3)


UNSUPPORTED: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None], str]] = {
    "unrotated": (
        "granite",
        lambda writer: writer.add_rope_scaling_finetuned(False),
        "rope.scaling.finetuned",
    ),
    "shared expert": (
        "granitemoe",
        lambda writer: writer.add_tensor(
            "blk.0.ffn_gate_shexp.weight", np.zeros((8, 64), dtype=np.float32)
        ),
        "a shared expert",
    ),
    "softmax": (
        "glm4moe",
        lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
        "expert_gating_func",
    ),
    "dense latents": (
        "deepseek2",
        lambda writer: writer.add_rope_dimension_count(8),
        "expert_count",
    ),
    "temperature": (
        "deepseek2",
        lambda writer: writer.add_attn_temperature_scale(0.1),
        "attention.temperature_scale",
    ),
    "latents without rotation": (
        "deepseek2",
        lambda writer: writer.add_expert_count(8),
        "rope.dimension_count",
    ),
    "scores of a third kind": (
        "deepseek2",
        with_third_scoring,
        "expert_gating_func",
    ),
    "images": (
        "glm4",
        lambda writer: writer.add_rope_dimension_sections([2, 2, 2, 2]),
        "images are not supported",
    ),
    "two bases": ("olmo2", with_two_bases, "rope.freq_base_swa"),
    "partial rotation": (
        "qwen3",
        lambda writer: writer.add_rope_dimension_count(16),
        "partial rotation is not supported",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_a_family_lacks_is_refused_by_name(name: str, tmp_path: Path) -> None:
    architecture, add, expected = UNSUPPORTED[name]
    path = tmp_path / "model.gguf"
    writer = written(path, architecture)
    add(writer)
    with pytest.raises(StartupError, match=expected):
        config_of(writer, path)


def split(model: Path, folder: Path) -> list[Path]:
    """The model's file as two parts: its metadata and tensors, and a part without tensors."""
    first = folder / "tiny-00001-of-00002.gguf"
    first.write_bytes(model.read_bytes())
    second = folder / "tiny-00002-of-00002.gguf"
    second.write_bytes(header(1, 0, tensor("rope_freqs.weight", (8,))))
    return [first, second]


@pytest.mark.parametrize("part", [0, 1])
def test_parts_of_a_split_model(part: int, model: Path, tmp_path: Path) -> None:
    parts = split(model, tmp_path)
    found = resolve_model_folder(str(parts[part]))
    assert found == parts[0]
    with pytest.raises(StartupError, match="is not positive"):
        # Its second part was read: the factors there are zeros.
        read_model_spec(found)
    parts[1].unlink()
    with pytest.raises(StartupError, match="lacks 1 of 2 parts"):
        resolve_model_folder(str(parts[0]))


def test_a_folder_with_one_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one-Q8_0.gguf").write_bytes(model.read_bytes())
    (tmp_path / "mmproj-one.gguf").write_bytes(b"GGUF")
    assert resolve_model_folder(str(tmp_path)).name == "one-Q8_0.gguf"
    (tmp_path / "two-Q4_K_M.gguf").write_bytes(model.read_bytes())
    with pytest.raises(StartupError, match="holds 2 GGUF models"):
        resolve_model_folder(str(tmp_path))
    assert find_gguf(tmp_path, "q4_k_m") == tmp_path / "two-Q4_K_M.gguf"
    assert resolve_model_folder(f"{tmp_path}:Q8_0").name == "one-Q8_0.gguf"
    with pytest.raises(StartupError, match="no GGUF file of 'Q5_0'"):
        resolve_model_folder(f"{tmp_path}:Q5_0")


def test_a_hub_cache(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repo = tmp_path / "models--someone--tiny-GGUF"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"):
        (snapshot / name).symlink_to(model)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = resolve_model_folder("someone/tiny-GGUF:q4_k_m", may_download=False)
    assert found == snapshot / "tiny-Q4_K_M.gguf"


def test_no_tokenizer(model: Path) -> None:
    with pytest.raises(StartupError, match="--tokenizer-path"):
        Tokenizer.from_folder(model)


MIXED: list[Callable[[str], str]] = [lambda name: "Q4_0", lambda name: "F16"]


@pytest.mark.parametrize("types", MIXED)
def test_dtype_follows_the_bytes(types: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, types)
    expected = "float16" if types("") == "F16" else "float32"
    assert read_model_spec(path).dtype == expected
