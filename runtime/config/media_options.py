"""Options about images in prompts."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_field import option


@dataclass(frozen=True, kw_only=True)
class MediaArgs:
    """Options about images in prompts."""

    allow_media_domains: list[str] = option(
        [],
        "Hosts that images may be fetched from (.example.org: every host below it); none when "
        "absent. The server never connects to addresses that are not public.",
        metavar="HOST",
    )
    allow_media_urls: bool = option(False, "Let images be fetched from every public host.")
    media_root: list[str] = option(
        [], "Folders whose files requests may name as images (a path or file://).", metavar="DIR"
    )
    limit_mm_data_per_request: str | None = option(
        None, 'JSON object with the most images per prompt; the default is {"image": 16}.'
    )
