from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from runtime.checkpoint.hub import resolve_model_folder
from runtime.errors import StartupError
from tests.support.fake_checkpoint import write_config, write_model


class Hub:
    """Stands in for `snapshot_download`."""

    def __init__(self) -> None:
        self.cached: Path | None = None
        self.online: Path | Exception = errors.LocalEntryNotFoundError("no network")
        self.calls: list[bool] = []
        self.patterns: list[str] = []

    def snapshot_download(self, repo_id, *, revision, local_files_only=False, **patterns):
        self.calls.append(local_files_only)
        self.patterns = patterns["allow_patterns"]
        assert "*.bin" not in patterns["allow_patterns"]
        if local_files_only:
            if self.cached is None:
                raise errors.LocalEntryNotFoundError("not cached")
            return str(self.cached)
        if isinstance(self.online, Exception):
            raise self.online
        return str(self.online)


@pytest.fixture
def hub(monkeypatch):
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.example"))


def test_a_folder_is_itself(tmp_path, hub):
    assert resolve_model_folder(str(tmp_path)) == tmp_path
    assert not hub.calls


def test_the_cache_comes_first(tmp_path, hub):
    hub.cached = write_model(tmp_path)
    assert resolve_model_folder("owner/name") == tmp_path
    assert hub.calls == [True]
    assert "tokenizer*.json" in hub.patterns


def test_what_only_asks_for_numbers_fetches_no_weights(tmp_path, hub):
    hub.online = write_config(tmp_path)
    assert resolve_model_folder("owner/name", only_config=True) == tmp_path
    assert hub.patterns == ["config.json", "generation_config.json"]
    assert resolve_model_folder("owner/name") == tmp_path
    assert "*.safetensors" in hub.patterns


def test_an_incomplete_cache_is_completed(tmp_path, hub):
    hub.cached = write_config(tmp_path / "partial")
    hub.online = write_model(tmp_path / "whole")
    assert resolve_model_folder("owner/name") == tmp_path / "whole"
    assert hub.calls == [True, False]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.LocalEntryNotFoundError("x"), "owner/name (repository not found)"),
        (errors.OfflineModeIsEnabled("x"), "owner/name (repository not found)"),
        (
            errors.RepositoryNotFoundError("x", response=response(404)),
            "owner/name (repository not found)",
        ),
        (errors.GatedRepoError("x", response=response(403)), "owner/name (gated repository)"),
        (
            errors.RevisionNotFoundError("x", response=response(404)),
            "owner/name (revision 'v2' not found)",
        ),
        (errors.HfHubHTTPError("boom\nmore", response=response(500)), "downloaded: boom"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(hub, error, text):
    hub.online = error
    with pytest.raises(StartupError) as caught:
        resolve_model_folder("owner/name", "v2")
    assert text in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("path", ["/no/such", "./absent", "a/b/c", ""])
def test_what_cannot_be_an_id_is_not_looked_up(hub, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match="is not a folder"):
        resolve_model_folder(path)
    assert not hub.calls


def test_a_file_is_not_a_folder(tmp_path, hub):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(StartupError, match="is a file"):
        resolve_model_folder(str(file))


# Each repository: files of the listing that were not loaded, and those loaded that are taken away.
LISTINGS = {
    "org/plain": ([], []),
    "org/other-formats": (
        [
            *(
                "onnx/model.onnx",
                "onnx/config.json",
                "openvino/openvino_config.json",
                "tf_model.h5",
            ),
            *("int8/model.safetensors", "model.fp16.safetensors", "pytorch_model.bin"),
            *("trainer_state.json", "quantize_config.json", "README.md", "eval/results.json"),
        ],
        [],
    ),
    # By hand, without what a start can do without.
    "org/no-template": (["chat_template.jinja"], []),
    "org/no-weights": ([], ["model.safetensors"]),
    "org/no-config": ([], ["config.json"]),
}
PROGRAM = """
import json, sys
from runtime.checkpoint.hub import resolve_model_folder
from runtime.errors import StartupError
found = {}
for name in sys.argv[2:]:
    try:
        found[name] = str(resolve_model_folder(name, may_download=sys.argv[1] == "download"))
    except StartupError as error:
        found[name] = error.message
print(json.dumps(found))
"""


@pytest.mark.parametrize("may_download", [True, False])
def test_a_cache_that_has_what_is_needed_starts_offline(tmp_path: Path, may_download: bool) -> None:
    folders = {}
    for name, (unloaded, lost) in LISTINGS.items():
        store = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        commit = f"{len(folders):040}"
        folders[name] = folder = store / "snapshots" / commit
        write_model(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text("{}")
        listed = [*unloaded, *(path.name for path in folder.iterdir())]
        for file in lost:
            (folder / file).unlink()
        (store / "refs").mkdir()
        (store / "refs" / "main").write_text(commit)
        entries = {file: {"size": 1, "blob_id": "0" * 40} for file in listed}
        (store / "trees").mkdir()
        listing = {"format_version": 1, "files": entries}
        (store / "trees" / f"{commit}.json").write_text(json.dumps(listing))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "download" if may_download else "", *LISTINGS],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    for name in ("org/plain", "org/other-formats", "org/no-template"):
        assert found[name] == str(folders[name])
    for name in ("org/no-weights", "org/no-config"):
        assert found[name].startswith(f"{name} (repository not found): no such local folder")
    # What a listing knows and a start may want is told.
    assert ("org/no-template are used as they are" in done.stderr) is may_download
    assert "org/other-formats" not in done.stderr
