"""Local images: only regular files under the roots are read, also through links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.config.media_options import MediaArgs
from runtime.errors import InvalidRequest, StartupError
from runtime.media.image_loader import read_file
from runtime.media.image_source import MAX_IMAGE_BYTES, FileImage, read_item
from runtime.media.media_policy import MediaPolicy, read_policy


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a b.png").write_bytes(b"inside")
    (folder / "cat.png").write_bytes(b"cat")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return folder


def policy(root: Path) -> MediaPolicy:
    return read_policy(MediaArgs(media_root=[str(root)]))


def read(text: str, root: Path) -> bytes:
    source = read_item(text, "x")
    assert isinstance(source, FileImage), source
    return read_file(source, policy(root), "x")


def test_files_below_a_root(root: Path) -> None:
    for text in ("cat.png", f"{root}/cat.png", f"file://{root}/cat.png", "inner/../cat.png"):
        assert read(text, root) == b"cat"
    assert read(f"file://{root}/inner/a%20b.png", root) == b"inside"
    (root / "link.png").symlink_to(root / "inner" / "a b.png")
    (root / "folder.link").symlink_to(root / "inner")
    assert read("link.png", root) == read("folder.link/a b.png", root) == b"inside"


def test_nothing_without_a_root(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="--media-root"):
        read_file(FileImage(str(root / "cat.png")), MediaPolicy(), "x")


def test_nothing_outside(root: Path, tmp_path: Path) -> None:
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    (root / "up.png").symlink_to(tmp_path)
    (root / "inner" / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "pipe.png")
    outside = [
        "../secret.png", f"{tmp_path}/secret.png", f"file://{tmp_path}/secret.png", "out.png",
        "up.png/secret.png", "inner/loop.png", "pipe.png", "inner/.", "./", "/etc/passwd",
        "/dev/zero", "missing.png", "file:///proc/self/environ", "file://%2e%2e/secret.png",
        "a\0.png", "/proc/self/root/etc/hostname.png", f"{root}-other.png",
    ]  # fmt: skip
    for text in outside:
        with pytest.raises(InvalidRequest, match="no such regular file under --media-root") as told:
            read(text, root)
        assert str(tmp_path) not in told.value.message


def test_a_file_that_is_too_large_is_not_read(root: Path) -> None:
    with (root / "large.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    with pytest.raises(InvalidRequest, match="at most 20 MiB"):
        read("large.png", root)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"media_root": ["/no/such/folder"]}, "--media-root /no/such/folder"),
        ({"allow_media_domains": ["http://a.example/"]}, "--allow-media-domains http"),
        ({"allow_media_domains": ["."]}, r"--allow-media-domains \."),
        ({"limit_mm_data_per_request": "5"}, "--limit-mm-data-per-request"),
        ({"limit_mm_data_per_request": '{"image": "a"}'}, "--limit-mm-data-per-request"),
        ({"limit_mm_data_per_request": '{"smell": 1}'}, "'smell' is none of"),
        ({"limit_mm_data_per_request": '{"image": -1}'}, r"in \[0, 256\]"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        read_policy(MediaArgs(**options))


def test_the_limit_of_images() -> None:
    few = read_policy(MediaArgs(limit_mm_data_per_request='{"image": 2, "video": 0}'))
    few.check_count(2, "x")
    with pytest.raises(InvalidRequest, match="at most 2 images"):
        few.check_count(3, "x")
    assert read_policy(MediaArgs()).max_images == 16
