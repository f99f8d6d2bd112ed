"""The process that decodes images: bombs, damaged files, crashes, limits, cached files."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from runtime.client.tenant import TENANT
from runtime.errors import InvalidRequest, Overloaded
from runtime.media.image_loader import ImageLoader, NamedItem, digest_of
from runtime.media.media_policy import MediaPolicy
from tests.support.pictures import PATCHES, SQUARE, base64_of, data_url, encoded, noise


@pytest.fixture(scope="module")
def loader() -> Iterator[ImageLoader]:
    found = ImageLoader(PATCHES, MediaPolicy())
    yield found
    found.close()


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png(width: int, height: int, *chunks: bytes, color: int = 2) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def zeros(num_bytes: int) -> bytes:
    """So many of them, whole MiB, compressed a thousandfold."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    # After a full flush each MiB looks like the one before; of zeros alone Adler's sum is plain.
    check = struct.pack(">HH", num_bytes % 65521, 1)
    return b"\x78\xda" + block * (num_bytes >> 20) + packer.flush() + check


def animated(kind: str, count: int = 3) -> bytes:
    frames = [noise(16, 16, seed=seed) for seed in range(count)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def many_frames() -> bytes:
    """A GIF of 100,000 pictures, cut off behind the last one."""
    still = encoded(noise(16, 16, "P"), "GIF")
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 16, 16, 0) + b"\x08\x01\x01\x00"
    return still[:-1] + frame * 100_000


PICTURE = encoded(noise(90, 60))
JPEG = encoded(noise(300, 200), "JPEG")
HUGE_TEXT = chunk(b"zTXt", b"a\0\0" + zeros(256 * 2**20))
REFUSED: dict[str, tuple[bytes, str]] = {
    "one pixel": (encoded(noise(1, 1)), "4 to 32768 pixels"),
    "three pixels": (encoded(noise(3, 90)), "4 to 32768 pixels"),
    "65,000 x 65,000": (png(65_000, 65_000, chunk(b"IDAT", zeros(2**20))), "it has 65000 x 65000"),
    "30,000 x 30,000": (png(30_000, 30_000, chunk(b"IDAT", zeros(2**20))), "it has 30000 x 30000"),
    "no pixels": (png(0, 0, chunk(b"IDAT", b"")), "damaged|4 to 32768"),
    "a strip": (encoded(noise(2000, 5)), "at most 200 times the other"),
    "a huge text beside the picture": (PICTURE[:33] + HUGE_TEXT + PICTURE[33:], "damaged"),
    "cut off png": (PICTURE[: len(PICTURE) // 2], "damaged or cut off"),
    "cut off jpeg": (JPEG[: len(JPEG) // 2], "damaged or cut off"),
    "only a signature": (b"\x89PNG\r\n\x1a\n", "damaged or cut off"),
    "jpeg signature and noise": (b"\xff\xd8\xff" + os.urandom(500), "damaged or cut off"),
    "gif signature": (b"GIF89a" + bytes(100), "damaged|4 to 32768"),
    "webp signature": (b"RIFF\x10\0\0\0WEBPVP8 " + bytes(100), "damaged or cut off"),
    "animated png": (animated("PNG"), "animated"),
    "animated webp": (animated("WEBP"), "animated"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "PNG, JPEG, WebP"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "PNG, JPEG, WebP"),
    "tiff": (encoded(noise(16, 16), "TIFF"), "PNG, JPEG, WebP"),
    "bmp": (encoded(noise(16, 16), "BMP"), "PNG, JPEG, WebP"),
    "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(50), "PNG, JPEG, WebP"),
    "ico": (encoded(noise(16, 16), "ICO"), "PNG, JPEG, WebP"),
    "pdf": (b"%PDF-1.7\n", "PNG, JPEG, WebP"),
    "a sound": (b"OggS" + bytes(100), "PNG, JPEG, WebP"),
    "text": (b"hello, this is no picture at all", "PNG, JPEG, WebP"),
}
TAKEN: dict[str, bytes] = {
    "gif of many pictures": many_frames(),
    "more pixels than it has": png(64, 64, chunk(b"IDAT", zeros(512 * 2**20))),
    "progressive jpeg": encoded(noise(60, 60), "JPEG", progressive=True),
    "several pictures in a jpeg": encoded(
        noise(60, 60), "MPO", save_all=True, append_images=[noise(60, 60, seed=1)]
    ),
    "camera data that says nothing": encoded(noise(60, 60), "JPEG", exif=b"Exif\0\0nonsense"),
    "large": encoded(Image.new("RGB", (7000, 5000), "red"), "JPEG"),
}


async def load(loader: ImageLoader, *contents: bytes | str) -> Any:
    items = [each if isinstance(each, str) else base64_of(each) for each in contents]
    return await loader.load([NamedItem(each, f"image {at}") for at, each in enumerate(items)])


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(loader: ImageLoader, name: str) -> None:
    content, words = REFUSED[name]
    pid = loader.pid
    with pytest.raises(InvalidRequest, match=words) as told:
        await load(loader, content)
    assert told.value.message.startswith("image 0: the image cannot be used: ")
    assert len(told.value.message) < 300
    assert pid in (None, loader.pid), "the process died of it"
    (fine,) = await load(loader, PICTURE)
    assert fine.size == (3, 56, 84)


@pytest.mark.parametrize("name", TAKEN)
async def test_what_looks_odd_and_is_taken(loader: ImageLoader, name: str) -> None:
    (fine,) = await load(loader, TAKEN[name])
    assert fine.num_tokens * 3 * 28 * 28 == len(fine.pixels)


async def test_words_of_base64(loader: ImageLoader) -> None:
    text = base64_of(PICTURE)
    lines = "\r\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    first, *others = await load(loader, text, lines, text.rstrip("="), data_url(PICTURE))
    assert all(each == first for each in others)
    for wrong in ("data:image/png;base64,!!!!", "iVBORw0KGgo*", "data:;base64,====="):
        with pytest.raises(InvalidRequest, match=r"not base64|PNG, JPEG|files are not"):
            await load(loader, wrong)


async def test_what_is_known_is_not_decoded_again(loader: ImageLoader) -> None:
    content = encoded(noise(70, 70, seed=99))
    first = await load(loader, content)
    before = loader.num_decoded
    assert await load(loader, content, content) == first * 2
    assert loader.num_decoded == before
    # Whether another tenant has sent it must not show.
    token = TENANT.set("another")
    try:
        (other,) = await load(loader, content)
    finally:
        TENANT.reset(token)
    assert loader.num_decoded == before + 1
    assert other.pixels == first[0].pixels
    # By the digest the worker keeps what the tower made of it, which takes longer than decoding.
    assert other.digest != first[0].digest


async def test_one_item_that_stands_there_twice_is_read_once(loader: ImageLoader) -> None:
    item = base64_of(encoded(noise(70, 71, seed=98)))
    before = loader.num_decoded
    first, second = await loader.load([NamedItem(item, "a"), NamedItem(item, "b")])
    assert first == second
    assert loader.num_decoded == before + 1


async def test_the_digest_is_of_pixels_shape_and_processor(loader: ImageLoader) -> None:
    # The same bytes, laid out otherwise.
    flat, high = Image.new("RGB", (112, 56), "red"), Image.new("RGB", (56, 112), "red")
    images = await load(loader, encoded(flat), encoded(high), encoded(flat, "WEBP", lossless=True))
    assert images[0].pixels == images[1].pixels
    digests = [each.digest for each in images]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]
    pixels, size = images[0].pixels, images[0].size
    other = replace(PATCHES, mean=(0.5, 0.5, 0.5))
    found = {digest_of(vision, size, pixels) for vision in (PATCHES, other, SQUARE)}
    assert len(found) == 3
    assert digests[0] in found
    assert {len(each) for each in found} == {16}


async def test_a_model_without_sight(loader: ImageLoader) -> None:
    blind = ImageLoader(None, MediaPolicy())
    with pytest.raises(InvalidRequest, match="image 0: this model takes text only"):
        await load(blind, PICTURE)
    assert await load(blind) == []
    assert blind.pid is None


async def test_nothing_is_fetched_or_opened_by_default(loader: ImageLoader) -> None:
    for item in ("http://127.0.0.1:9/a.png", "file:///etc/passwd", "/etc/passwd", "cat.png"):
        with pytest.raises(InvalidRequest, match=r"not (fetched|read) here"):
            await load(loader, item)


@pytest.fixture
async def own() -> AsyncIterator[ImageLoader]:
    found = ImageLoader(SQUARE, MediaPolicy())
    yield found
    found.close()


async def test_the_process_is_started_again(own: ImageLoader) -> None:
    (first,) = await load(own, PICTURE)
    assert (first.size, first.num_tokens) == ((3, 112, 112), 4)
    pid = own.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    (second,) = await load(own, JPEG)
    assert second.num_tokens == 4
    assert own.pid not in (None, pid)


async def test_bytes_at_work_are_bounded() -> None:
    small = ImageLoader(SQUARE, MediaPolicy(), max_bytes_at_work=100_000)
    with contextlib.closing(small):
        contents = [encoded(noise(60, 60, seed=seed)) for seed in range(5)]
        requests = (load(small, each) for each in contents)
        found = await asyncio.gather(*requests, return_exceptions=True)
        refused = [each for each in found if isinstance(each, Overloaded)]
        assert refused
        assert all("too many other requests" in str(each) for each in refused)
        # What was held is let go.
        assert len(await load(small, encoded(noise(60, 60, seed=5)))) == 1


async def test_what_one_request_has_ready_counts_too() -> None:
    # Eight are worked on at a time, for which there is room; what is ready waits for the others.
    small = ImageLoader(SQUARE, MediaPolicy(), max_bytes_at_work=800_000)
    with contextlib.closing(small):
        contents = [encoded(noise(60, 60, seed=seed)) for seed in range(40)]
        with pytest.raises(InvalidRequest, match="send fewer of them"):
            await load(small, *contents)
        # Nothing is held any more, and what fits is taken.
        assert len(await load(small, *contents[:8])) == 8


async def test_many_at_once(own: ImageLoader) -> None:
    contents = [encoded(noise(200, 200, seed=seed)) for seed in range(20)]
    found = await asyncio.gather(*(load(own, content) for content in contents))
    assert len({image.digest for (image,) in found}) == 20


def test_pictures_of_the_table_are_what_they_say() -> None:
    """They would be refused for another reason otherwise."""
    assert Image.open(io.BytesIO(animated("WEBP"))).is_animated
    assert Image.open(io.BytesIO(animated("PNG"))).is_animated
    assert Image.open(io.BytesIO(TAKEN["several pictures in a jpeg"])).format == "MPO"
    assert Image.open(io.BytesIO(TAKEN["gif of many pictures"])).n_frames > 90_000
    assert base64.b64decode(base64_of(PICTURE)) == PICTURE
