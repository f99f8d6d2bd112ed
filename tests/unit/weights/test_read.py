"""Reading a checkpoint with several threads gives what reading it in order gives."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from runtime.checkpoint.check import check_model_folder
from runtime.errors import StartupError
from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import read_model_spec
from runtime.weights import read_tensors as read
from runtime.weights.fill import load_weights, shards_of
from runtime.weights.load_model import build_model, load_model
from tests.support.tiny_models import copy_of, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("ahead", [0, 50_000, 2**30])
@pytest.mark.parametrize("name", ["llama_sharded", "qwen3"])
def test_copies_equal_views(name: str, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_AHEAD_BYTES", ahead)
    folder = tiny_model(name)
    summary = check_model_folder(folder, read_model_spec(folder))
    views = [(each, tensor.clone()) for each, tensor in read.checkpoint_tensors(summary, CPU, {})]
    copies = list(read.copies(summary.tensors, CPU, {}))
    assert [each for each, _ in copies] == [each for each, _ in views]
    for (_, copy), (_, view) in zip(copies, views, strict=True):
        assert torch.equal(copy, view)


def test_a_file_that_went_away(tmp_path: Path) -> None:
    folder = copy_of("llama_sharded", tmp_path / "model")
    summary = check_model_folder(folder, read_model_spec(folder))
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(StartupError, match="cannot be read"):
        list(read.copies(summary.tensors, CPU, {}))


@pytest.mark.parametrize("name", ["llama_biased", "llama_sharded", "qwen3"])
def test_ranks_copy_no_more_than_their_part(name: str) -> None:
    folder = tiny_model(name)
    config = read_model_spec(folder)
    summary = check_model_folder(folder, config)
    copied: Counter[str] = Counter()
    for rank in range(2):
        context = BuildContext(
            dtype=torch.float32,
            device=CPU,
            tp_rank=rank,
            tp_size=2,
            all_reduce=lambda part: part,
            gather_columns=lambda part: part,
        )
        usual = load_model(folder, config, context, lambda share: None)
        model = build_model(config, context)
        parts = list(read.copies(summary.tensors, CPU, shards_of(model)))
        copied.update({each: tensor.nbytes for each, tensor in parts})
        load_weights(model, parts)
        for (_, mine), (_, theirs) in zip(model.holders(), usual.holders(), strict=True):
            for parameter, _ in mine.parameters():
                assert torch.equal(mine.plain(parameter), theirs.plain(parameter))
    shared = [
        info.name for info in summary.tensors.values() if copied[info.name] != info.size_bytes
    ]
    # Both ranks take these whole: norms, biases of sums, the embeddings, a key head that is alone.
    assert not [name for name in shared if "mlp" in name and "bias" not in name]
    assert not [name for name in shared if "q_proj" in name or "o_proj.weight" in name]
    assert all(copied[name] == 2 * summary.tensors[name].size_bytes for name in shared)
