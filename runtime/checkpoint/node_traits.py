"""Collects what must be the same on all nodes of a worker: versions, options and the model."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from runtime.config.options import WorkerConfig
from runtime.ipc.node_messages import NodeTraits

_WEIGHT_FILES = ("*.safetensors", "*.gguf")


def traits_of(config: WorkerConfig) -> NodeTraits:
    """Return this node's version, options and model, for comparison with the other nodes'."""
    try:
        version = metadata.version("headrace")
    except metadata.PackageNotFoundError:
        version = ""
    num_nodes = 1 if config.node is None else config.node.num_nodes
    digest = _digest_of_model(config)
    return NodeTraits(version, num_nodes, config.tp_size, digest, config.pp_size)


def _digest_of_model(config: WorkerConfig) -> str:
    """Return a hash of `config.json` and of the weight files' names and sizes; reads no weights."""
    folder = Path(config.model_folder)
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else []
    if not files:
        described = folder / "config.json"
        digest.update(described.read_bytes() if described.exists() else b"")
        if config.load_format != "dummy":
            files = sorted(file for kind in _WEIGHT_FILES for file in folder.glob(kind))
    for file in files:
        digest.update(f"\n{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()
