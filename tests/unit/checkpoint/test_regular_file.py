"""Irregular files are refused at once, so that a model folder cannot block its reader."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint.check import check_model_folder
from runtime.checkpoint.json_file import read_json_object
from runtime.errors import StartupError
from runtime.models.registry import read_model_spec
from tests.support.fake_checkpoint import write_model

# Without the refusal some of these wait for ever.
pytestmark = pytest.mark.timeout(60)


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _bind,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through_link", [False, True])
def test_weights_that_are_no_regular_file(tmp_path: Path, kind: str, through_link: bool) -> None:
    folder = write_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.unlink()
    made = tmp_path / "made" if through_link else weights
    KINDS[kind](made)
    if through_link:
        weights.symlink_to(made)
    with pytest.raises(StartupError) as caught:
        check_model_folder(folder, read_model_spec(folder))
    assert caught.value.message == f"{weights} is {kind}, not a regular file"


@pytest.mark.parametrize("kind", KINDS)
def test_json_that_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    KINDS[kind](path)
    with pytest.raises(StartupError, match=f"{path} is {kind}, not a regular file"):
        read_json_object(path)


def test_a_link_to_a_file_is_read_as_in_the_hubs_cache(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "snapshot")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        blob = path.rename(blobs / f"{path.name}.blob")
        path.symlink_to(blob)
    assert check_model_folder(folder, read_model_spec(folder)).tensors


def test_a_link_to_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "nothing")
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        check_model_folder(folder, read_model_spec(folder))
