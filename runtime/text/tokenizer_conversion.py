"""Makes a missing `tokenizer.json` once, with `transformers` in a child process.

The conversion needs `transformers`, which may import torch. The front process must import neither,
so the conversion runs as `python -m runtime.text.tokenizer_conversion <folder> <file>`. The result
is cached.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from runtime.errors import StartupError
from runtime.ipc.spawn import child_environment

_TIMEOUT_S = 300.0
# Patterns of files that may have a vocabulary. The tokenizer is converted again if one changes.
_SOURCES = ("*.model", "*.tiktoken", "*.txt", "vocab.json", "tekken.json", "*token*.json")
# Files that match the patterns but have only settings.
_SETTINGS = frozenset({"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"})


def converted_tokenizer_file(folder: Path, cache: Path | None = None) -> Path:
    """Return the path of a `tokenizer.json` made from the vocabulary files in `folder`.

    The first call for these files makes it; later ones find it in the cache.

    Args:
        folder: a model folder without `tokenizer.json`.
        cache: folder of the results; default `~/.cache/headrace/tokenizers`.

    Raises:
        StartupError: the folder has no vocabulary that can be converted.
    """
    sources = sorted({path for pattern in _SOURCES for path in folder.glob(pattern)})
    if all(path.name in _SETTINGS for path in sources):
        raise StartupError(f"No tokenizer in {folder}: there is no tokenizer.json.")
    digest = hashlib.sha256()
    for path in [*sources, folder / "config.json"]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    result = (cache or _cache_folder()) / f"{digest.hexdigest()[:32]}.json"
    if not result.is_file():
        _run_conversion(folder, result)
    return result


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "headrace" / "tokenizers"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        # The home folder may be read-only, as in many containers. Then each start converts again.
        return Path(tempfile.mkdtemp(prefix="headrace-tokenizer-"))
    return folder


def _run_conversion(folder: Path, result: Path) -> None:
    module = "runtime.text.tokenizer_conversion"
    command = [sys.executable, "-P", "-m", module, str(folder), str(result)]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=child_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"Cannot convert the tokenizer in {folder}: {error}") from error
    if done.returncode != 0 or not result.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise StartupError(
            f"No tokenizer.json in {folder}, and transformers cannot make one: {lines[-1]}"
        )


def convert(folder: Path, result: Path) -> None:
    """Make a `tokenizer.json` from the vocabulary files in `folder`, and write it to `result`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    partial = result.with_name(f".{os.getpid()}-{result.name}")
    tokenizer.backend_tokenizer.save(str(partial))
    # The file appears as a whole: another server may be starting at the same time.
    partial.replace(result)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
