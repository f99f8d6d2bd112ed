"""Finds the files of a GGUF model, given a file, a part of a split model, or a folder. No torch."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from runtime.checkpoint.gguf.header import GgufFile, GgufTensor, read_gguf
from runtime.errors import StartupError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 1024


def is_gguf(path: Path) -> bool:
    """Whether a model's path names a GGUF file."""
    return path.suffix == SUFFIX and not path.is_dir()


def find_gguf(folder: Path, quantization: str = "") -> Path | None:
    """Return the GGUF file in a folder (of a split file, the first part); `None` if there is none.

    Args:
        folder: a local folder.
        quantization: selects a file by a part of its name, such as `Q4_K_M`.

    Raises:
        StartupError: the folder has several models, or none with that quantization; the message has
            one line, with their names.
    """
    models = [
        path
        for path in sorted(folder.glob(f"**/*{SUFFIX}" if quantization else f"*{SUFFIX}"))
        if (part := _PART.fullmatch(path.name)) is None or int(part["number"]) == 1
    ]
    # `mmproj` files have the image tower of a vision model, so they are not models.
    models = [path for path in models if not path.name.lower().startswith("mmproj")]
    if not quantization:
        if len(models) > 1:
            names = ", ".join(path.name for path in models[:4])
            raise StartupError(
                f"{folder} holds {len(models)} GGUF models ({names}"
                f"{', ...' if len(models) > 4 else ''}); give --model-path the file itself"
            )
        return models[0] if models else None
    wanted = re.compile(rf"(^|[-._]){re.escape(quantization)}([-._]|$)", re.IGNORECASE)
    found = [path for path in models if wanted.search(path.name.removesuffix(SUFFIX))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in (found or models)[:6]) or "none at all"
    what = f"{len(found)} GGUF files" if found else "no GGUF file"
    raise StartupError(f"{folder} has {what} of {quantization!r}; it has: {names}")


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model, given one of them.

    Raises:
        StartupError: a part of a split model is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise StartupError(f"{path}: a model of {count} parts")
    parts = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}{SUFFIX}")
        for number in range(1, count + 1)
    ]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise StartupError(
            f"{path.parent} lacks {len(absent)} of {count} parts of a GGUF model: {absent[0]}"
        )
    return parts


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of all files of a model: metadata from the first, tensors from all.

    Raises:
        StartupError: a file is missing, malformed or cannot be read, or the files do not belong
            together; the message has one line.
    """
    try:
        stamps = tuple(
            (part, part.stat().st_mtime_ns, part.stat().st_size) for part in parts_of(path)
        )
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    return _open(stamps)


def forget_headers() -> None:
    """Free the headers that `open_gguf` keeps; a vocabulary takes megabytes."""
    _open.cache_clear()


# The last headers are kept, because description, tensors and tokenizer are read one after the
# other.
@lru_cache(maxsize=2)
def _open(stamps: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    first, *others = (read_gguf(path) for path, _, _ in stamps)
    tensors: dict[str, GgufTensor] = {}
    for file in (first, *others):
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise StartupError(
                    f"{file.path}: tensor {tensor.name[:64]!r} is in another part, too"
                )
            tensors[tensor.name] = tensor
    if not tensors:
        raise StartupError(f"{first.path} has no tensors: a vocabulary alone is not a model")
    promised = first.metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise StartupError(f"{first.path}: {len(tensors)} tensors, of {promised} that it promises")
    return GgufFile(first.path, first.metadata, list(tensors.values()))
