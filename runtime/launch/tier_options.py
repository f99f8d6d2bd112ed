"""Refuses options that do not work with a prefix cache in host memory and files.

The option of this cache is `--enable-hierarchical-cache`.
"""

from __future__ import annotations

import math

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.config.page_files_config import PageFilesConfig
from runtime.errors import StartupError


def host_pool_ratio(config: ServerConfig, model: ModelSpec) -> float:
    """Return the number of pages in host memory for each page of the KV pool; 0 for none.

    Raises:
        StartupError: the ratio is out of bounds, or the model or another option does not support
            host memory for pages. The message is one line.
    """
    scheduling = config.scheduling
    ratio = scheduling.hicache_ratio
    if not (math.isfinite(ratio) and ratio > 0):
        raise StartupError(f"--hicache-ratio must be a number above 0, got {ratio:g}.")
    if not scheduling.enable_hierarchical_cache:
        return 0.0
    refused = {
        "omit --disable-radix-cache; it is the prefix cache that has two tiers": (
            scheduling.disable_radix_cache
        ),
        "embedding and scoring models have no prefix cache": not model.keeps_state,
        "omit --swa-full-tokens-ratio; window pages are not kept in host memory": (
            scheduling.swa_full_tokens_ratio is not None
        ),
        "omit --pp-size; it is not checked over stages": config.parallel.pp_size > 1,
    }
    for why, applies in refused.items():
        if applies:
            raise StartupError(f"--enable-hierarchical-cache: {why}.")
    return ratio


def page_files(config: ServerConfig, model: ModelSpec) -> PageFilesConfig | None:
    """Return the settings of the files with cached pages; `None` if there are no such files.

    Raises:
        StartupError: the options do not go together, or one is wrong; the message is one line.
    """
    scheduling = config.scheduling
    if scheduling.hicache_storage_backend is None:
        return None
    if not scheduling.enable_hierarchical_cache:
        raise StartupError("--hicache-storage-backend needs --enable-hierarchical-cache.")
    if config.parallel.tp_size > 1:
        raise StartupError("--hicache-storage-backend: omit --tp-size; ranks have no files.")
    if model.is_recurrent:
        raise StartupError("--hicache-storage-backend: recurrent states are not kept in files.")
    return PageFilesConfig.parse(scheduling.hicache_storage_backend_extra_config)
