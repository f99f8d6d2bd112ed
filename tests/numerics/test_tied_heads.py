"""Heads that `config.json` ties to the embeddings but files store, against `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.models.registry import read_model_spec
from tests.support.engine import InProcessEngine
from tests.support.tiny_gemma3_vision import tiny_gemma3_vision
from tests.support.tiny_models import tiny_model
from tests.support.tiny_vision import tiny_vision

HEAD = "lm_head.weight"
SOURCES = {
    "llama_tied": (lambda: tiny_model("llama_tied"), "AutoModelForCausalLM"),
    "qwen3": (lambda: tiny_model("qwen3"), "AutoModelForCausalLM"),
    "qwen3_bfloat16": (lambda: tiny_model("qwen3_bfloat16"), "AutoModelForCausalLM"),
    "gemma3": (lambda: tiny_model("gemma3"), "AutoModelForCausalLM"),
    "gemma3_vision": (lambda: tiny_gemma3_vision(tied=True), "AutoModelForImageTextToText"),
    "qwen3_vl": (lambda: tiny_vision("qwen3_vl"), "AutoModelForImageTextToText"),
}


def tied_folder(name: str, folder: Path, held: str) -> Path:
    """A copy of the model `name`, tied by its configuration, whose files hold the heads `held`."""
    shutil.copytree(SOURCES[name][0](), folder)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    if "text_config" in config:
        config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    embedding = next(each for each in tensors if each.endswith("embed_tokens.weight"))
    tensors.pop(HEAD, None)
    change: dict[str, Tensor] = {
        "neither": {},
        "another": {HEAD: tensors[embedding].flip(0).contiguous()},
        # The last number alone: a comparison must go to the end.
        "last": {HEAD: last_changed(tensors[embedding])},
        "the same": {HEAD: tensors[embedding].clone()},
        "in float32": {HEAD: tensors[embedding].float()},
        "head alone": {HEAD: tensors[embedding]},
    }[held]
    if held == "head alone":
        del tensors[embedding]
    save_file({**tensors, **change}, folder / "model.safetensors", {"format": "pt"})
    return folder


def last_changed(matrix: Tensor) -> Tensor:
    changed = matrix.clone()
    changed[-1, -1] = 3.0
    return changed


def their_model(name: str, folder: Path) -> Any:
    import transformers

    cls = getattr(transformers, SOURCES[name][1])
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


# With whether the head takes memory of its own.
CASES = [
    *((name, "another", True) for name in SOURCES),
    *((name, "head alone", False) for name in SOURCES),
    ("llama_tied", "neither", False),
    ("llama_tied", "the same", False),
    ("llama_tied", "last", True),
    ("qwen3_bfloat16", "in float32", True),
]


@pytest.mark.parametrize(("name", "held", "has_own_head"), CASES)
def test_the_head_in_the_files_wins(
    tmp_path: Path, name: str, held: str, has_own_head: bool
) -> None:
    folder = tied_folder(name, tmp_path / "model", held)
    prompt = [5, 60, 7, 300, 44, 9]
    engine = InProcessEngine(folder)
    tokens = prompt + engine.generate(prompt, 16, ignore_eos=True)
    with torch.inference_mode():
        logits = their_model(name, folder)(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    assert tokens[len(prompt) :] == logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    assert read_model_spec(folder).has_own_head is has_own_head
