"""Reading a checkpoint with several threads gives what reading it in order gives."""

from pathlib import Path

import pytest
import torch

from runtime.checkpoint.check import check_model_folder
from runtime.checkpoint.config_json import load_model_config
from runtime.errors import StartupError
from runtime.loader import read
from tests.support.tiny_models import copy_of, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("ahead", [0, 50_000, 2**30])
@pytest.mark.parametrize("name", ["llama_sharded", "qwen3"])
def test_copies_equal_views(name: str, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_AHEAD_BYTES", ahead)
    folder = tiny_model(name)
    summary = check_model_folder(folder, load_model_config(folder))
    views = [(each, tensor.clone()) for each, tensor in read.checkpoint_tensors(summary, CPU)]
    copies = list(read.copies(list(summary.tensors.values()), CPU))
    assert [each for each, _ in copies] == [each for each, _ in views]
    for (_, copy), (_, view) in zip(copies, views, strict=True):
        assert torch.equal(copy, view)


def test_a_file_that_went_away(tmp_path: Path) -> None:
    folder = copy_of("llama_sharded", tmp_path / "model")
    summary = check_model_folder(folder, load_model_config(folder))
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(StartupError, match="cannot be read"):
        list(read.copies(list(summary.tensors.values()), CPU))
