"""Builds the file tier of the prefix cache, and computes the model's identity for its files."""

from __future__ import annotations

import hashlib
import json
import logging
from importlib import metadata
from pathlib import Path

from runtime.cache.file_tier import FileTier
from runtime.cache.page_files import PageFiles
from runtime.config.options import WorkerConfig
from runtime.errors import StartupError
from runtime.executor.host_pool import HostPool

logger = logging.getLogger(__name__)


def build_file_tier(config: WorkerConfig, pool: HostPool, kv_cache_dtype: str) -> FileTier | None:
    """Open the folder of files for the prefix cache; `None` if the options do not ask for it.

    Args:
        config: the worker's configuration.
        pool: the rank's pages in host memory.
        kv_cache_dtype: the data types of the KV cache, as text.

    Raises:
        StartupError: the folder cannot be used; the message is one line.
    """
    if config.page_files is None:
        return None
    folder, most = Path(config.page_files.path), int(config.page_files.max_size_gb * 1e9)
    try:
        files = PageFiles(folder, page_identity(config, kv_cache_dtype), most)
    except OSError as error:
        raise StartupError(f"--hicache-storage-backend file: {folder}: {error.strerror}.") from None
    logger.info(
        "Files for the prefix cache: %d in %s, %.2f GB of %.2f GB",
        len(files),
        folder,
        files.num_bytes / 1e9,
        most / 1e9,
    )
    return FileTier(files, pool.page_bytes)


def page_identity(config: WorkerConfig, kv_cache_dtype: str) -> bytes:
    """Return a hash, 32 bytes, of everything except the tokens that determines the bytes of a page.

    Weight files are identified by their names, sizes and modification times, because reading them
    would take too long. So a copy of a model's folder may count as another model.
    """
    folders = {Path(config.model_folder), Path(config.weights_folder or config.model_folder)}
    paths = sorted(
        path
        for folder in folders
        for path in ([folder] if folder.is_file() else folder.rglob("*"))
        if path.is_file() and path.suffix in {".json", ".safetensors", ".gguf", ".bin"}
    )
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    try:
        version = metadata.version("headrace")
    except metadata.PackageNotFoundError:
        version = ""
    # Without an option the seed differs at each start; it decides the weights only of a dummy.
    seed = config.random_seed if config.load_format == "dummy" else None
    facts = (
        *(version, found, config.model_overrides, config.load_format, seed),
        *(config.dtype, kv_cache_dtype, config.page_size, config.device),
        *(config.attention_backend, config.deterministic, config.rounds_products),
    )
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
