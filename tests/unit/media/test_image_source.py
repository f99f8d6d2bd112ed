"""How a request's forms of an image are read."""

import base64

import pytest

from runtime.errors import InvalidRequest
from runtime.media.image_source import (
    MAX_IMAGE_BYTES,
    FileImage,
    ImageUrl,
    InlineImage,
    RemoteImage,
    format_of,
    read_item,
)

PNG, JPEG = b"\x89PNG\r\n\x1a\n" + bytes(40), b"\xff\xd8\xff\xe0" + bytes(40)


def test_every_form() -> None:
    for content in (PNG, JPEG, b"GIF89a" + bytes(9), b"RIFF0000WEBP" + bytes(9)):
        assert format_of(content)
        text = base64.b64encode(content).decode()
        wanted = InlineImage(text.encode())
        for form in (text, f"data:image/png;base64,{text}", f"DATA:;base64,{text}"):
            assert read_item(form, "x") == wanted
            assert read_item(ImageUrl(url=form), "x") == wanted
    # Lines of base64, and base64 of whatever: it is decoded, then refused for what it is.
    assert isinstance(read_item("iVBORw0K\nGgoAAAA=", "x"), InlineImage)
    assert isinstance(read_item(base64.b64encode(b"II*\0" + bytes(30)).decode(), "x"), InlineImage)
    for url in ("http://a.example/b.png", "HTTPS://a.example/b"):
        assert read_item(url, "x") == RemoteImage(url)
    for path in ("cat.png", "/a/b.jpg", "../cat", "~/cat.png", "file:///a/b.jpg", "file:/a/b.jpg"):
        found = read_item(path, "x")
        assert isinstance(found, FileImage), path
        assert not found.path.startswith("file:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:image/png,abc", "must be data:image"),
        ("data:image/png;base64", "must be data:image"),
        ("data:image/png;base64,", "empty"),
        ("video:AAAA", "frames as a list of images"),
        ("", "empty"),
        ("data:image/png;base64,\u00e4", "not base64"),
        ("A" * (MAX_IMAGE_BYTES * 4 // 3 + 8), "at most 20 MiB"),
    ],
)
def test_what_is_none(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_item(text, "x")
