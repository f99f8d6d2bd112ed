"""Weights of a live model: an update is kept or undone as a whole, addresses stay, memory goes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import InvalidRequest, StartupError
from runtime.models.layers.build_context import BuildContext
from runtime.models.model import CausalLM
from runtime.models.registry import read_model_spec
from runtime.weights import weight_files as files
from runtime.weights.live_weights import LiveWeights
from runtime.weights.load_model import load_model
from runtime.weights.weight_files import WeightFiles
from tests.support.fake_checkpoint import expected_tensors, write_config

CONTEXT = BuildContext(dtype=torch.float32, device=torch.device("cpu"))
BIASED = {"attention_bias": True, "mlp_bias": True}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def folder_of(path: Path, seed: int, **changes: object) -> Path:
    write_config(path, **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_tensors(path).items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def live(folder: Path, linear: str | None = None) -> tuple[CausalLM, LiveWeights]:
    config = read_model_spec(folder)
    context = dataclasses.replace(CONTEXT, linear=linear)
    model = load_model(folder, config, context, lambda _: None)
    source = WeightFiles.open(folder, config)
    return model, LiveWeights(model, source, lambda: None, folder / "spilt")


def held(weights: LiveWeights, folder: Path) -> dict[str, torch.Tensor]:
    return {name: weights.read(name, 10**6)[0] for name in expected_tensors(folder)}


def assert_holds(weights: LiveWeights, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in held(weights, folder).items():
        assert torch.equal(tensor, tensors[name]), name


def break_reading(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the disk fail after so many tensors, once."""
    read, count = files._read, iter(range(10**6))

    def broken(file: object, info: object) -> torch.Tensor:
        if next(count) == after:
            raise OSError(5, "Input/output error")
        return read(file, info)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_read", broken)


@pytest.mark.parametrize("linear", [None, "reference"])
@pytest.mark.parametrize("came_from", ["the folder", "a changed folder", "a trainer"])
@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_disk_that_fails_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear: str | None, came_from: str, after: int
) -> None:
    old = folder_of(tmp_path / "old", 0, **BIASED)
    new = folder_of(tmp_path / "new", 1, **BIASED)
    _, weights = live(old, linear)
    if came_from == "a changed folder":
        os.utime(old / "model.safetensors", ns=(1, 1))
    if came_from == "a trainer":
        tensors = load_file(old / "model.safetensors")
        weights.load_tensors({name: t.shape for name, t in tensors.items()}, tensors.items())
        weights.keep()
    break_reading(monkeypatch, after)
    with pytest.raises(StartupError, match="Input/output error"):
        weights.load_folder(new)
    weights.undo()
    assert_holds(weights, old)
    # And nothing stands in the way of the next one.
    weights.load_folder(new)
    weights.keep()
    assert_holds(weights, new)


def test_another_ranks_failure_takes_a_whole_update_back(tmp_path: Path) -> None:
    old = folder_of(tmp_path / "old", 0, **BIASED)
    new = folder_of(tmp_path / "new", 1, **BIASED)
    _, weights = live(old)
    weights.load_folder(new)
    assert_holds(weights, new)
    weights.undo()
    assert_holds(weights, old)
    tensors = {f"{Q_PROJ}.bias": torch.ones(16), "model.norm.weight": torch.ones(16)}
    weights.load_tensors({name: t.shape for name, t in tensors.items()}, tensors.items())
    weights.undo()
    assert_holds(weights, old)


def test_a_folder_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = folder_of(tmp_path / "old", 0), folder_of(tmp_path / "new", 1)
    _, weights = live(old)
    read, path = files._read, new / "model.safetensors"

    def cut(file: object, info: object) -> torch.Tensor:
        os.truncate(path, path.stat().st_size - 1)
        return read(file, info)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_read", cut)
    with pytest.raises(StartupError, match=r"ends inside of tensor|was changed"):
        weights.load_folder(new)
    monkeypatch.setattr(files, "_read", read)
    weights.undo()
    assert_holds(weights, old)


def test_addresses_stay_where_graphs_hold_them(tmp_path: Path) -> None:
    for tied in (False, True):
        old = folder_of(tmp_path / f"old{tied}", 0, tie_word_embeddings=tied, **BIASED)
        new = folder_of(tmp_path / f"new{tied}", 1, tie_word_embeddings=tied, **BIASED)
        model, weights = live(old, "reference")

        def addresses(model: CausalLM = model) -> list[int]:
            return [
                holder.plain(name).data_ptr()
                for _, holder in model.holders()
                for name, _ in holder.parameters()
            ]

        before = addresses()
        weights.load_folder(new)
        weights.undo()
        weights.load_folder(new)
        weights.keep()
        assert addresses() == before
        assert_holds(weights, new)
        if tied:
            embeddings = model.model.embed_tokens  # type: ignore[attr-defined]
            assert embeddings.head.unpack().data_ptr() == embeddings.weight.data_ptr()


@pytest.mark.parametrize("linear", [None, "reference"])
@pytest.mark.parametrize("is_on_disk", [True, False])
def test_released_weights_come_back(tmp_path: Path, linear: str | None, is_on_disk: bool) -> None:
    folder = folder_of(tmp_path / "old", 0, tie_word_embeddings=True, **BIASED)
    model, weights = live(folder, linear)
    if not is_on_disk:
        os.utime(folder / "model.safetensors", ns=(1, 1))
    size = sum(holder.size_bytes for _, holder in model.holders())
    weights.release()
    assert sum(holder.size_bytes for _, holder in model.holders()) < 0.1 * size
    with pytest.raises(InvalidRequest, match="released"):
        weights.read("model.norm.weight", 1)
    with pytest.raises(InvalidRequest, match="released"):
        weights.load_tensors({"model.norm.weight": [16]}, [("model.norm.weight", torch.ones(16))])
    weights.restore()
    assert_holds(weights, folder)
    assert not (folder / "spilt").exists()


def test_a_failed_update_of_released_weights_leaves_them_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = folder_of(tmp_path / "old", 0), folder_of(tmp_path / "new", 1)
    _, weights = live(old)
    weights.release()
    break_reading(monkeypatch, 5)
    with pytest.raises(StartupError):
        weights.load_folder(new)
    weights.undo()
    assert weights.are_released
    weights.restore()
    assert_holds(weights, old)


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "old", 0)
    _, weights = live(folder)
    shapes = {"model.norm.weight": [16], "what": [1], f"{Q_PROJ}.weight": [2, 2]}
    with pytest.raises(InvalidRequest, match=r"1 tensor unknown \(what\); 1 tensor of the wrong"):
        weights.load_tensors(shapes, [("model.norm.weight", torch.zeros(16))])
    assert_holds(weights, folder)
