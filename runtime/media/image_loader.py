"""Loads images in the front process: reads the files, and lets another process decode them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import struct
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import msgspec

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.client.tenant import TENANT
from runtime.errors import InvalidRequest, Overloaded
from runtime.eventloop.offload import OffloadPool
from runtime.grammar.cache import ByteCache
from runtime.ipc.fork_server import ForkServer
from runtime.media.image_job import ImageJob, ScaledImage, head_of
from runtime.media.image_size import max_scaled_pixels, num_image_tokens
from runtime.media.image_source import (
    MAX_IMAGE_BYTES,
    FileImage,
    ImageItem,
    ImageSource,
    InlineImage,
    RemoteImage,
    read_item,
    too_many_bytes,
)
from runtime.media.media_policy import MediaPolicy
from runtime.media.remote_image import Fetcher
from runtime.requests.arrival import timed
from runtime.requests.image_input import PreparedImage

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# With `O_NONBLOCK`, opening a pipe does not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(source: FileImage, policy: MediaPolicy, param: str) -> bytes:
    """Return the content of a file below one of the allowed folders. It may block.

    Args:
        source: the path in the request; a relative path is searched below each folder.
        policy: what the operator allows.
        param: the image's path in the request, for errors.

    Raises:
        InvalidRequest: no files are allowed, this file is not allowed, or the file is too large.
    """
    if not policy.roots:
        raise InvalidRequest(
            f"{param}: files are not read here (--media-root names the folders whose files may "
            "be). Send the image as base64 or as a data URL.",
            param=param,
        )
    path = urllib.parse.unquote(source.path) if "%" in source.path else source.path
    for root in policy.roots:
        real = _real_path(root, path)
        if real is None or not real.is_relative_to(root):
            continue
        try:
            return _read_below(root, real.relative_to(root).parts, param)
        except OSError:
            continue
    raise InvalidRequest(f"{param}: there is no such regular file under --media-root.", param=param)


def _real_path(root: str, path: str) -> PurePath | None:
    try:
        # Links in the path are resolved here; the file is opened later without following any link.
        return PurePath(os.path.realpath(os.path.join(root, path)))
    except (OSError, ValueError):
        return None


def _read_below(root: str, parts: tuple[str, ...], param: str) -> bytes:
    """Read a file, opening its path folder by folder, so that no link is followed.

    Not even a link that was created after the path was checked is followed.
    """
    if not parts:
        raise IsADirectoryError
    folder = os.open(root, _FOLDER)
    try:
        for name in parts[:-1]:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # The file's type is checked first, because opening a device may have effects.
        _require_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))
        file = os.open(parts[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    with open(file, "rb", buffering=0) as opened:
        found = os.fstat(file)
        _require_regular(found)
        if found.st_size > MAX_IMAGE_BYTES:
            raise too_many_bytes(param)
        content = opened.read(MAX_IMAGE_BYTES + 1) or b""
    if len(content) > MAX_IMAGE_BYTES:
        raise too_many_bytes(param)
    return content


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise IsADirectoryError


CACHE_BYTES = 128 * 2**20
# The most bytes of files and pixels of all requests whose images are being prepared.
MAX_BYTES_AT_WORK = 2**30
_DIGEST_BYTES = 16
_CHANNELS = 3
NO_VISION = "this model takes text only"

# Threads that wait for the decoding process, which limits its work itself.
_PREPARING = OffloadPool("preparation of an image", workers=8, max_queued=1024, timeout_s=110.0)
# Threads that read files and hash large images.
_READING = OffloadPool("reading of an image", workers=4, max_queued=1024, timeout_s=20.0)
# So many images of one request are prepared at a time, so that other requests get their turn.
_AT_A_TIME = 8

_scaled = msgspec.msgpack.Decoder(ScaledImage)


@dataclass(frozen=True)
class NamedItem:
    """An image of a request.

    Attributes:
        item: the image, as the request has it.
        param: the image's path in the request, for errors.
    """

    item: ImageItem
    param: str


@dataclass
class _Share:
    """The bytes of one request whose images are being prepared.

    Attributes:
        num_bytes: bytes of its files and pixels.
        num_ready: bytes of its images that are ready and wait for the others.
    """

    num_bytes: int = 0
    num_ready: int = 0


class ImageLoader:
    """Prepares the images of requests for the model.

    Attributes:
        vision: how the model takes images; `None` if it takes none.
        policy: which sources of images are allowed.
        num_decoded: number of files that were decoded; others were in the cache.
    """

    def __init__(
        self,
        vision: VisionSpec | None,
        policy: MediaPolicy,
        *,
        fetcher: Fetcher | None = None,
        max_bytes_at_work: int = MAX_BYTES_AT_WORK,
    ) -> None:
        """Prepare; the decoding process starts with the first image.

        Args:
            vision: how the model takes images.
            policy: which sources of images the operator allows.
            fetcher: fetches remote images; by default one that follows `policy`.
            max_bytes_at_work: most bytes of files and pixels that are being prepared.
        """
        self.vision = vision
        self.policy = policy
        self.num_decoded = 0
        self._fetcher = fetcher or Fetcher(policy)
        self._process = ForkServer("runtime.media.image_process", "decoding images")
        self._known: ByteCache[PreparedImage] = ByteCache(CACHE_BYTES)
        self._bytes_at_work = 0
        self._max_bytes_at_work = max_bytes_at_work

    @property
    def pid(self) -> int | None:
        """Process id of the decoding process; `None` before the first start."""
        return self._process.pid

    def close(self) -> None:
        """Stop the decoding process."""
        self._process.stop()

    def require_vision(self, param: str) -> VisionSpec:
        """Return how the model takes images.

        Raises:
            InvalidRequest: the model takes no images.
        """
        if self.vision is None:
            raise InvalidRequest(f"{param}: {NO_VISION}.", param=param)
        return self.vision

    async def load(self, items: Sequence[NamedItem]) -> list[PreparedImage]:
        """Return all images of a request, prepared; a repeated image is prepared once.

        Raises:
            InvalidRequest: the model takes no images, an image is invalid, or the images take more
                bytes than all requests together may.
            Overloaded: too many images are being prepared.
            EngineDead: the process that decodes images died twice.
        """
        if not items:
            return []
        vision = self.require_vision(items[0].param)
        once = {id(each.item): each for each in items}
        sources = {key: read_item(each.item, each.param) for key, each in once.items()}
        slots = asyncio.Semaphore(_AT_A_TIME)
        share = _Share()

        async def prepare(key: int) -> PreparedImage:
            async with slots:
                image = await self._prepare(sources[key], once[key].param, vision, share)
            self._take(len(image.pixels), once[key].param, share)
            share.num_ready += len(image.pixels)
            return image

        tasks = {key: asyncio.create_task(prepare(key)) for key in sources}
        try:
            with timed("images"):
                await asyncio.gather(*tasks.values())
        except BaseException:
            # One invalid image refuses the request, so the other images are not needed.
            for task in tasks.values():
                task.cancel()
            raise
        finally:
            self._bytes_at_work -= share.num_ready
        return [tasks[id(each.item)].result() for each in items]

    async def _prepare(
        self, source: ImageSource, param: str, vision: VisionSpec, share: _Share
    ) -> PreparedImage:
        match source:
            case InlineImage():
                content = source
            case RemoteImage():
                content = InlineImage(await self._fetcher.fetch(source.url, param), False)
            case FileImage():
                with timed("files"):
                    file = await _READING.run(read_file, source, self.policy, param)
                content = InlineImage(file, False)
        size = len(content.content) + _CHANNELS * max_scaled_pixels(vision)
        self._take(size, param, share)
        try:
            return await self._known_or_decoded(content, param, vision)
        finally:
            self._take(-size, param, share)

    def _take(self, num_bytes: int, param: str, share: _Share) -> None:
        """Count bytes for a request; a negative number gives them back."""
        if num_bytes > 0 and self._bytes_at_work + num_bytes > self._max_bytes_at_work:
            if self._bytes_at_work > share.num_bytes:
                raise Overloaded("The server is preparing images of too many other requests.")
            raise InvalidRequest(
                f"{param}: the images of this request take more than "
                f"{self._max_bytes_at_work >> 20} MiB once they are scaled; send fewer of them.",
                param=param,
            )
        self._bytes_at_work += num_bytes
        share.num_bytes += num_bytes

    async def _known_or_decoded(
        self, content: InlineImage, param: str, vision: VisionSpec
    ) -> PreparedImage:
        # The tenant is part of the key, because a fast answer would reveal what another tenant has
        # sent.
        tenant = TENANT.get()
        key = await _READING.run(_key_of, content.content, tenant)
        known = self._known.get(key)
        if known is not None:
            return known
        prepared = await _PREPARING.run(self._decode, content, param, vision, tenant)
        self.num_decoded += 1
        self._known.put(key, prepared, len(prepared.pixels) + len(key))
        return prepared

    def _decode(
        self, content: InlineImage, param: str, vision: VisionSpec, tenant: str
    ) -> PreparedImage:
        """Let the decoding process decode a file; called on a thread."""
        job = ImageJob(
            is_base64=content.is_base64,
            resizing=vision.resizing,
            factor=vision.patch_size * vision.merge_size,
            min_pixels=vision.min_pixels,
            max_pixels=vision.max_pixels,
            side=vision.side,
            resample=vision.resample,
        )
        found = _scaled.decode(self._process.ask(head_of(job), content.content))
        if found.is_busy:
            raise Overloaded(f"{param}: {found.error}; please try again.")
        if found.error:
            raise InvalidRequest(f"{param}: the image cannot be used: {found.error}.", param=param)
        size = _CHANNELS, found.height, found.width
        num_tokens = num_image_tokens(vision, found.height, found.width)
        # The result is checked, because a hostile file may have taken over the decoding process.
        if not num_tokens or len(found.pixels) != size[0] * size[1] * size[2]:
            raise InvalidRequest(f"{param}: the image cannot be used.", param=param)
        digest = digest_of(vision, size, found.pixels, tenant)
        return PreparedImage(digest, size, num_tokens, found.pixels)


def digest_of(
    vision: VisionSpec, size: tuple[int, int, int], pixels: bytes, tenant: str = ""
) -> bytes:
    """Return an image's digest: a hash of pixels, shape, processor's parameters and tenant.

    The digest is computed here from the model's input, so neither a client nor the decoding process
    can choose it. Tenants do not share image vectors. Computing them takes so long that the time
    would reveal whether another tenant has sent the same image before.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=tenant.encode())
    numbers = (vision.rescale_factor, *vision.mean, *vision.std)
    digest.update(struct.pack("<5q", *size, vision.patch_size, vision.merge_size))
    digest.update(struct.pack(f"<{len(numbers)}d", *numbers))
    digest.update(pixels)
    return digest.digest()


def _key_of(content: bytes | memoryview, tenant: str) -> bytes:
    # The tenant's hash is put first, so that the content need not be copied behind the name.
    key = hashlib.sha256(hashlib.sha256(tenant.encode()).digest())
    key.update(content)
    return key.digest()
