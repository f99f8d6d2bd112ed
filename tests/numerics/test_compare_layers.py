"""The tool that compares layers reports planted differences and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import copy_of, tiny_model
from tests.support.tiny_vision import TINY_VISION, tiny_vision
from tools.compare_layers import compare, first_beyond, main, our_stages, their_stages

TOKENS = [5, 7, 11, 300, 2, 7, 5, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]


@pytest.mark.parametrize("name", ["llama_biased", "mistral_window", "qwen2", "qwen3", "gemma3"])
def test_a_right_model_agrees(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_model(name)), "--prompt-len", "37"]) == 0
    printed = capsys.readouterr().out
    stages = [line.split("  ")[0].strip() for line in printed.splitlines()[1:-1]]
    parts = [f"layers.{i} {p}" for i in range(3) for p in ("attention", "o_proj", "mlp", "output")]
    assert stages == ["embeddings", *parts, "norm", "logits"]
    assert "All stages agree" in printed


@pytest.mark.parametrize("name", list(TINY_VISION))
def test_the_decoder_of_a_model_that_sees_agrees(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny_vision(name)), "--prompt-len", "37"]) == 0
    assert "All stages agree" in capsys.readouterr().out


def test_half_precision_agrees_within_its_own_tolerance() -> None:
    folder = str(tiny_model("qwen3_bfloat16"))
    assert main([folder, "--dtype", "bfloat16"]) == 0
    assert main([folder, "--dtype", "bfloat16", "--tolerance", "1e-6"]) == 1


@pytest.mark.parametrize(
    ("weight", "stage"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("model.layers.0.self_attn.k_proj.weight", "layers.0 attention"),
        ("model.layers.2.self_attn.o_proj.weight", "layers.2 o_proj"),
        ("model.layers.1.mlp.down_proj.weight", "layers.1 mlp"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_the_stage_of_a_planted_error_is_named(tmp_path: Path, weight: str, stage: str) -> None:
    planted = copy_of("llama", tmp_path / "planted")
    tensors = load_file(planted / "model.safetensors")
    # Of the embeddings that is the row of token 0.
    tensors[weight].view(-1)[:64] += 0.5
    save_file(tensors, planted / "model.safetensors", metadata={"format": "pt"})
    tokens = [0, *TOKENS]
    theirs = their_stages(tiny_model("llama"), tokens, "float32")
    differences = compare(our_stages(planted, tokens, "float32"), theirs)
    first = first_beyond(differences, 1e-4)
    assert first is not None
    assert first.stage == stage
    if weight == "model.embed_tokens.weight":
        assert (first.token, first.absolute) == (0, pytest.approx(0.5))


def test_the_command_names_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = copy_of("qwen3", tmp_path / "planted")
    tensors = load_file(planted / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] += 1.0
    save_file(tensors, planted / "model.safetensors", metadata={"format": "pt"})
    assert main([str(planted), "--reference", str(tiny_model("qwen3"))]) == 1
    assert "layers.1 mlp is the first that differs" in capsys.readouterr().out


def test_numbers_that_are_none_are_a_difference() -> None:
    right = {"norm": torch.ones(3, 4)}
    wrong = {"norm": torch.ones(3, 4)}
    wrong["norm"][1, 2] = torch.nan
    (difference,) = compare(wrong, right)
    assert (difference.relative, difference.token) == (float("inf"), 1)


def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert main([str(tiny_model("llama")), "--prompt-len", "257"]) == 2
    assert "--prompt-len must be in [1, 256]" in capsys.readouterr().err
