from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import pytest

from runtime.checkpoint.check import check_model_folder, warn_of_files
from runtime.checkpoint.headers import read_header
from runtime.errors import StartupError
from runtime.models.registry import read_model_spec
from tests.support.fake_checkpoint import (
    expected_tensors,
    write_config,
    write_model,
    write_safetensors,
    write_shards,
)


def check(folder):
    return check_model_folder(folder, read_model_spec(folder))


def error_of(folder):
    with pytest.raises(StartupError) as caught:
        check(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


def write_raw(path, header: object, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_whole_folder_passes(tmp_path, architecture):
    folder = write_model(tmp_path, architectures=[f"{architecture}ForCausalLM"])
    summary = check(folder)
    assert summary.dtype == "bfloat16"
    assert set(summary.tensors) == set(expected_tensors(folder))
    assert summary.total_bytes == sum(info.size_bytes for info in summary.tensors.values())


def test_shards_are_read_through_the_index(tmp_path):
    folder = write_config(tmp_path)
    write_shards(folder, expected_tensors(folder))
    assert {info.file.name for info in check(folder).tensors.values()} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_the_type_is_that_of_most_bytes(tmp_path):
    folder = write_config(tmp_path)
    tensors = expected_tensors(folder)
    norms = {name: shape for name, shape in tensors.items() if "norm" in name}
    rest = {name: shape for name, shape in tensors.items() if "norm" not in name}
    write_safetensors(folder / "a.safetensors", norms.items(), "F32")
    write_safetensors(folder / "b.safetensors", rest.items(), "F16")
    assert check(folder).dtype == "float16"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head(tmp_path, tied):
    folder = write_config(tmp_path, tie_word_embeddings=tied)
    tensors = expected_tensors(folder)
    assert ("lm_head.weight" in tensors) is not tied
    # Some tied checkpoints repeat the matrix; it is ignored.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(folder / "model.safetensors", tensors.items())
    assert ("lm_head.weight" in check(folder).tensors) is not tied


def test_old_rotary_buffers_are_ignored(tmp_path):
    folder = write_config(tmp_path)
    tensors = expected_tensors(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = (2,)
    write_safetensors(folder / "model.safetensors", tensors.items())
    check(folder)


def test_everything_wrong_is_named_in_one_line(tmp_path):
    folder = write_config(tmp_path)
    tensors = expected_tensors(folder)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = (24, 15)
    tensors["model.layers.2.mlp.up_proj.weight"] = (24, 16)
    write_safetensors(folder / "model.safetensors", tensors.items())
    message = error_of(folder)
    assert "1 tensor missing (model.norm.weight)" in message
    assert "model.layers.1.mlp.up_proj.weight is [24, 15], expected [24, 16]" in message
    assert "1 tensor unexpected (model.layers.2.mlp.up_proj.weight)" in message


def test_tensors_that_nothing_needs_are_one_warning(tmp_path, caplog):
    folder = write_config(tmp_path)
    spare = {"v_head.summary.weight": (1, 16), "v_head.summary.bias": (1,), "score.weight": (2, 16)}
    write_safetensors(folder / "model.safetensors", {**expected_tensors(folder), **spare}.items())
    summary = check(folder)
    assert set(summary.unused) == set(spare)
    assert set(summary.tensors) == set(expected_tensors(folder))
    warn_of_files(folder, read_model_spec(folder), summary)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "3 tensors unused (v_head.summary.weight, v_head.summary.bias, score.weight)" in (
        record.getMessage()
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_alone_stands_for_tied_embeddings(tmp_path, tied):
    folder = write_config(tmp_path, tie_word_embeddings=tied)
    tensors = expected_tensors(folder)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_safetensors(folder / "model.safetensors", tensors.items())
    if tied:
        assert check(folder).tensors["model.embed_tokens.weight"].name == "lm_head.weight"
    else:
        assert "1 tensor missing (model.embed_tokens.weight)" in error_of(folder)


def test_only_a_few_names_are_listed(tmp_path):
    folder = write_config(tmp_path)
    write_safetensors(folder / "model.safetensors", [("model.norm.weight", (16,))])
    message = error_of(folder)
    assert "20 tensors missing (model.embed_tokens.weight, " in message
    assert message.endswith(", ...)")


def test_integer_weights_are_refused(tmp_path):
    folder = write_config(tmp_path)
    write_safetensors(folder / "model.safetensors", expected_tensors(folder).items(), "I8")
    assert "not of a floating type (model.embed_tokens.weight is I8" in error_of(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(tmp_path, name):
    folder = write_config(tmp_path)
    (folder / name).write_bytes(b"\x80\x04")
    message = error_of(folder)
    assert "pickled" in message
    assert name in message


def test_no_weights(tmp_path):
    assert "has no weights" in error_of(write_config(tmp_path))


def test_missing_shard(tmp_path):
    folder = write_config(tmp_path)
    write_shards(folder, expected_tensors(folder), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = error_of(folder)
    assert "lacks 1 of 3 weight files: model-00002-of-00003.safetensors" in message


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, {"weight_map": {"a": "../x"}}, {"weight_map": {"a": 1}}]
)
def test_bad_index(tmp_path, index):
    folder = write_config(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in error_of(folder)


def test_tensor_in_two_files(tmp_path):
    folder = write_config(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(folder / name, [("model.norm.weight", (16,))])
    assert "is in a.safetensors and in b.safetensors" in error_of(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1])
def test_truncated_file(tmp_path, keep):
    folder = write_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated" in error_of(folder)


def test_a_clone_without_lfs_is_told_so(tmp_path):
    folder = write_config(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    assert "git lfs pull" in error_of(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xfe\xfd",
        b"[" * 200_000,
        [],
        {"a": None},
        {"a": {"dtype": "BF16", "shape": [2]}},
        {"a": {"dtype": "XX", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}},
        {"a": {"dtype": "BF16", "shape": [-2], "data_offsets": [4, 0]}},
        {"a": {"dtype": "BF16", "shape": [2.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "BF16", "shape": "ab", "data_offsets": [0, 4]}},
        {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [-4, 0]}},
        {"a": {"dtype": ["BF16"], "shape": [2], "data_offsets": [0, 4]}},
    ],
)
def test_malformed_header(tmp_path, header):
    write_raw(tmp_path / "x.safetensors", header, bytes(4))
    with pytest.raises(StartupError, match="malformed header"):
        read_header(tmp_path / "x.safetensors")


def test_absurd_header_length_allocates_nothing(tmp_path):
    write_raw(tmp_path / "x.safetensors", {}, length=2**63)
    with pytest.raises(StartupError, match="not a safetensors file"):
        read_header(tmp_path / "x.safetensors")


def test_offsets_beyond_the_file(tmp_path):
    entry = {"dtype": "BF16", "shape": [2**40], "data_offsets": [0, 2**41]}
    write_raw(tmp_path / "x.safetensors", {"a": entry})
    with pytest.raises(StartupError, match="truncated"):
        read_header(tmp_path / "x.safetensors")


PROGRAM = """
import sys
from pathlib import Path
from runtime.checkpoint.check import check_model_folder
from runtime.models.registry import FAMILIES, read_model_spec
from runtime.checkpoint.hub import resolve_model_folder
from runtime.errors import StartupError

try:
    folder = resolve_model_folder(sys.argv[1])
    config = read_model_spec(folder)
    check_model_folder(folder, config)
except StartupError as error:
    print(error)
slow = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors"} & set(sys.modules)
assert not slow, slow
assert "LlamaForCausalLM" in FAMILIES
"""


def test_a_broken_folder_is_refused_at_once_and_without_torch(tmp_path):
    folder = write_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=False
    )
    after = os.times()
    took_s = after.children_user + after.children_system
    took_s -= before.children_user + before.children_system
    assert done.returncode == 0, done.stderr
    assert "truncated" in done.stdout
    assert took_s < 3
