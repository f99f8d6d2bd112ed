"""Follows docs/how-to/add-a-model-family.md: with a spec and a line a family is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runtime.checkpoint.check import check_model_folder
from runtime.errors import StartupError
from runtime.models.registry import FAMILIES, Family, read_model_spec
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import copy_of, edit_json, tiny_model

ARCHITECTURE = "ToyForCausalLM"
LINE = Family("tests.support.toy_family:read", FAMILIES["LlamaForCausalLM"].model)
NAMES = {"input_layernorm": "ln_attention", "post_attention_layernorm": "ln_mlp"}
PROMPT = list(range(5, 40))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = copy_of("llama", tmp_path / "toy")
    edit_json(folder / "config.json", architectures=[ARCHITECTURE], model_type="toy")
    tensors = load_file(folder / "model.safetensors")
    for old, new in NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_without_the_line_the_family_is_unknown(folder: Path) -> None:
    with pytest.raises(StartupError, match=f"'{ARCHITECTURE}' is not supported"):
        read_model_spec(folder)


def test_a_spec_and_a_line_are_a_family(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, ARCHITECTURE, LINE)
    assert check_model_folder(folder, read_model_spec(folder)).total_bytes
    toy, llama = InProcessEngine(folder), InProcessEngine(tiny_model("llama"))
    assert toy.generate(PROMPT, 20) == llama.generate(PROMPT, 20)
