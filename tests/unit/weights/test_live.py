"""Weights of a live model: an update is kept or undone as a whole, addresses stay, memory goes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import InvalidRequest, StartupError
from runtime.models.layers.build_context import BuildContext
from runtime.models.model import CausalLM
from runtime.models.registry import read_model_spec
from runtime.weights.live_weights import LiveWeights
from runtime.weights.load_model import load_model
from runtime.weights.weight_files import WeightFiles, read_tensors
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


class CutShort:
    """Proof of life between two tensors, at one of which a file loses all of them."""

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._left, self._content = path, after, path.read_bytes()

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            os.truncate(self._path, 100)

    def mend(self) -> None:
        self._path.write_bytes(self._content)


def live(
    folder: Path, linear: str | None = None, beat: Callable[[], None] = lambda: None
) -> tuple[CausalLM, LiveWeights]:
    config = read_model_spec(folder)
    context = dataclasses.replace(CONTEXT, linear=linear)
    model = load_model(folder, config, context, lambda _: None)
    source = WeightFiles.open(folder, config)
    return model, LiveWeights(model, source, beat, folder / "spilt")


def held(weights: LiveWeights, folder: Path) -> dict[str, torch.Tensor]:
    return {name: weights.read(name, 10**6)[0] for name in expected_tensors(folder)}


def assert_holds(weights: LiveWeights, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in held(weights, folder).items():
        assert torch.equal(tensor, tensors[name]), name


def test_a_disk_that_fails_is_told_in_one_line() -> None:
    # Nothing lies at address 0, so the system says what it says of a broken disk.
    memory = Path("/proc/self/mem")
    info = TensorInfo("a", "F32", (1,), memory, 0, 4)
    with pytest.raises(StartupError, match=r"^/proc/self/mem cannot be read: Input/output error$"):
        list(read_tensors(memory, [("a", info)]))


@pytest.mark.parametrize("linear", [None, "reference"])
@pytest.mark.parametrize("came_from", ["the folder", "a changed folder", "a trainer"])
@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_file_that_fails_half_way(
    tmp_path: Path, linear: str | None, came_from: str, after: int
) -> None:
    old = folder_of(tmp_path / "old", 0, **BIASED)
    new = folder_of(tmp_path / "new", 1, **BIASED)
    tensors = load_file(old / "model.safetensors")
    # What comes from a trainer beats, too.
    before = len(tensors) if came_from == "a trainer" else 0
    cut = CutShort(new / "model.safetensors", before + after)
    _, weights = live(old, linear, cut)
    if came_from == "a changed folder":
        os.utime(old / "model.safetensors", ns=(1, 1))
    if came_from == "a trainer":
        weights.load_tensors({name: t.shape for name, t in tensors.items()}, tensors.items())
        weights.keep()
    with pytest.raises(StartupError, match="ends inside of tensor"):
        weights.load_folder(new)
    weights.undo()
    assert_holds(weights, old)
    cut.mend()
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


def test_a_folder_that_changes_while_it_is_read(tmp_path: Path) -> None:
    old, new = folder_of(tmp_path / "old", 0), folder_of(tmp_path / "new", 1)
    path = new / "model.safetensors"
    _, weights = live(old, beat=lambda: os.truncate(path, path.stat().st_size - 1))
    with pytest.raises(StartupError, match=r"ends inside of tensor|was changed"):
        weights.load_folder(new)
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


def test_a_failed_update_of_released_weights_leaves_them_released(tmp_path: Path) -> None:
    old, new = folder_of(tmp_path / "old", 0), folder_of(tmp_path / "new", 1)
    _, weights = live(old, beat=CutShort(new / "model.safetensors", 5))
    weights.release()
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
