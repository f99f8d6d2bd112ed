from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from runtime.checkpoint.hub import DEMO_MODELS, resolve_model_folder
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
    assert "*.safetensors" in hub.patterns


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


def test_the_demo_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = resolve_model_folder("headrace-demo")
    assert (folder / "tokenizer.json").is_file()
    assert folder.is_absolute()
    # A folder of that name is meant where there is one.
    (tmp_path / "headrace-demo").mkdir()
    assert resolve_model_folder("headrace-demo").resolve() == tmp_path / "headrace-demo"


def test_a_demo_model_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(DEMO_MODELS) == {"headrace-demo", "demo-vision"}
    monkeypatch.setitem(DEMO_MODELS, "demo-vision", tmp_path / "vision")
    with pytest.raises(StartupError, match=r"demo-vision: this demo model is not installed"):
        resolve_model_folder("demo-vision")
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "config.json").write_text("{}")
    assert resolve_model_folder("demo-vision") == tmp_path / "vision"
