"""Which sources of images the operator's options allow."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import msgspec

from runtime.config.media_options import MediaArgs
from runtime.errors import InvalidRequest, StartupError

DEFAULT_MAX_IMAGES = 16
# The most images of all prompts of a request together.
MAX_IMAGES_OF_BATCH = 256
_IMAGES, _OTHERS = "image", ("video", "audio")


@dataclass(frozen=True)
class MediaPolicy:
    """The allowed sources of images, and the number of images that a prompt may have.

    Attributes:
        domains: hosts from which images may be fetched; a leading dot means all hosts below the
            domain.
        any_domain: whether images may be fetched from every public host.
        roots: resolved paths of the folders whose files may be read.
        max_images: most images of one prompt.
    """

    domains: frozenset[str] = frozenset()
    any_domain: bool = False
    roots: tuple[str, ...] = ()
    max_images: int = DEFAULT_MAX_IMAGES
    _suffixes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Find the domains that begin with a dot."""
        suffixes = tuple(each for each in self.domains if each.startswith("."))
        object.__setattr__(self, "_suffixes", suffixes)

    def allows_host(self, host: str) -> bool:
        """Whether images may be fetched from `host`, judged by its name alone."""
        return self.any_domain or host in self.domains or host.endswith(self._suffixes)

    @property
    def fetches(self) -> bool:
        """Whether images may be fetched from any host at all."""
        return self.any_domain or bool(self.domains)

    def check_count(self, num_images: int, param: str) -> None:
        """Check the number of a prompt's images.

        Raises:
            InvalidRequest: there are too many images.
        """
        if num_images > self.max_images:
            raise InvalidRequest(
                f"{param}: a prompt may have at most {self.max_images} images here "
                f"(--limit-mm-data-per-request), got {num_images}.",
                param=param,
            )


def read_policy(options: MediaArgs) -> MediaPolicy:
    """Return the policy that the options define.

    Raises:
        StartupError: a domain is invalid, a folder is missing, or the limit is not a valid object.
    """
    for domain in options.allow_media_domains:
        bare = domain.removeprefix(".")
        if not bare or "/" in bare or ":" in bare or not bare.isascii():
            raise StartupError(
                f"--allow-media-domains {domain}: give names of hosts, such as "
                "pictures.example.org, or .example.org for all below it."
            )
    for folder in options.media_root:
        if not os.path.isdir(os.path.expanduser(folder)):
            raise StartupError(f"--media-root {folder}: there is no such folder.")
    return MediaPolicy(
        domains=frozenset(each.lower().rstrip(".") for each in options.allow_media_domains),
        any_domain=options.allow_media_urls,
        roots=tuple(os.path.realpath(os.path.expanduser(each)) for each in options.media_root),
        max_images=_max_images(options.limit_mm_data_per_request),
    )


def _max_images(text: str | None) -> int:
    if not text:
        return DEFAULT_MAX_IMAGES
    try:
        limits = msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise StartupError(f"--limit-mm-data-per-request: {error}") from None
    unknown = sorted(set(limits) - {_IMAGES, *_OTHERS})
    if unknown:
        raise StartupError(
            f"--limit-mm-data-per-request: {unknown[0]!r} is none of image, video, audio."
        )
    most = limits.get(_IMAGES, DEFAULT_MAX_IMAGES)
    if not 0 <= most <= MAX_IMAGES_OF_BATCH:
        raise StartupError(
            f"--limit-mm-data-per-request: image must be in [0, {MAX_IMAGES_OF_BATCH}], got {most}."
        )
    return most
