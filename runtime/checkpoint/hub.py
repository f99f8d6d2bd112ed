"""Finds the local folder of a model, given its path or hub id; downloads it if needed. No torch."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from runtime.checkpoint.demo import DEMO_NAMES, find_demo
from runtime.checkpoint.gguf.files import SUFFIX, find_gguf, is_gguf, parts_of
from runtime.checkpoint.headers import INDEX_FILE, SINGLE_FILE, weight_files
from runtime.errors import StartupError

logger = logging.getLogger(__name__)

# Patterns of the files that serving reads: no pickles, no code, no weights of other frameworks.
ALLOW_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
# Patterns of the files that must be cached for a start without the hub. A repository may have more
# files: further weights, training files, other formats in folders. `*` matches `/` too.
NEEDED_PATTERNS = [
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "vocab.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "modules.json",
    "*sentence*.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
# The files that are enough to know a model's size.
CONFIG_PATTERNS = ["config.json", "generation_config.json"]
IGNORE_PATTERNS = ["original/*", "consolidated*", "onnx/*"]


class RepositoryNotFound(StartupError):
    """A path is neither a local folder nor a repository that can be found.

    Attributes:
        repo_id: the id as it was requested.
    """

    def __init__(self, repo_id: str, advice: str) -> None:
        """Write a message that `repo_id` was not found, with `advice`."""
        super().__init__(f"{repo_id} (repository not found): {advice}")
        self.repo_id = repo_id


# Matches a GGUF quantization, which may follow a hub id after a colon.
_QUANTIZATION = re.compile(r"(UD-)?(I?Q\d\w*|T?Q\d_\d|F16|F32|BF16|MXFP4\w*)", re.IGNORECASE)
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


# The maximum number of characters of a path or hub id. The system's own error for longer names is
# less clear.
_MAX_PATH_CHARS = 4096


def is_local(path_or_id: str) -> bool:
    """Whether a model's path is a folder or file of this machine, or the name of a demo model."""
    try:
        exists = Path(path_or_id).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
    return bool(path_or_id) and (exists or path_or_id in DEMO_NAMES)


def resolve_model_folder(
    path_or_id: str,
    revision: str | None = None,
    *,
    only_config: bool = False,
    may_download: bool = True,
) -> Path:
    """Return the folder of a model, or its GGUF file; download it from the hub if not cached.

    Args:
        path_or_id: a local folder, a GGUF file, `owner/name` on the hub, or a demo model's name. A
            folder or a hub id may end in a quantization, as in `owner/name:Q4_K_M`.
        revision: branch, tag or commit on the hub; ignored for a local folder.
        only_config: whether only the configuration is needed, without weights and tokenizer.
        may_download: whether files that are not cached are fetched from the hub.

    Raises:
        StartupError: the path is neither a folder nor a repository that can be fetched; the message
            says what to do.
    """
    if len(path_or_id) > _MAX_PATH_CHARS:
        raise StartupError(
            f"{path_or_id[:64]}... is not a folder: its name has {len(path_or_id)} characters"
        )
    named, quantization = _split(path_or_id)
    local = _local_model(path_or_id, named, quantization)
    if local is not None:
        return local
    if path_or_id in DEMO_NAMES:
        return find_demo(path_or_id)[1]
    if _HUB_ID.fullmatch(named) is None:
        raise StartupError(f"{path_or_id or 'an empty path'} is not a folder")
    patterns = CONFIG_PATTERNS if only_config else ALLOW_PATTERNS
    if quantization:
        patterns = [f"*{quantization}*{SUFFIX}"]
    return _from_hub(named, revision, patterns, quantization, may_download=may_download)


def _split(path_or_id: str) -> tuple[str, str]:
    """Split a name like `owner/name:Q4_K_M` into name and quantization; the latter may be empty."""
    named, _, quantization = path_or_id.rpartition(":")
    if named and _QUANTIZATION.fullmatch(quantization):
        return named, quantization
    return path_or_id, ""


def _local_model(path_or_id: str, named: str, quantization: str) -> Path | None:
    """Return the folder or GGUF file at the path `path_or_id`; `None` if the path does not exist.

    For a path like `folder:Q4_K_M`, `named` is the folder and `quantization` selects the file.

    Raises:
        StartupError: the path is not valid, or leads to a file that is not GGUF.
    """
    try:
        path = Path(path_or_id).expanduser()
        if path_or_id and path.is_dir():
            return _model_in(path)
        if quantization and (folder := Path(named).expanduser()).is_dir():
            return _gguf_in(folder, quantization)
        is_file = path.is_file()
    # A part of the path is too long, or the path has a null byte, or `~` with an unknown user.
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartupError(f"{path_or_id[:256]!r} is not a folder: {reason}") from error
    if is_file and is_gguf(path):
        return parts_of(path)[0]
    if is_file:
        raise StartupError(
            f"{path_or_id} is a file; give the folder that holds config.json, or a GGUF file"
        )
    return None


def _model_in(folder: Path) -> Path:
    """Return the GGUF file in a folder without safetensors; else the folder."""
    if any(folder.glob("*.safetensors")):
        return folder
    return find_gguf(folder) or folder


def _gguf_in(folder: Path, quantization: str) -> Path:
    found = find_gguf(folder, quantization)
    assert found is not None, "it names what is missing"
    return found


def _from_hub(
    repo_id: str,
    revision: str | None,
    patterns: list[str],
    quantization: str,
    *,
    may_download: bool,
) -> Path:
    cached = _cached_folder(repo_id, revision, NEEDED_PATTERNS, quantization)
    if cached is not None:
        return cached
    missing: StartupError = RepositoryNotFound(
        repo_id,
        "no such local folder, it is not in the cache, and nothing is fetched here without "
        "--allow-weights-download",
    )
    if may_download:
        try:
            folder = _download(repo_id, revision, patterns)
            return _gguf_in(folder, quantization) if quantization else _model_in(folder)
        except StartupError as error:
            missing = error
    # After a manual download, optional files may be missing: weights and `config.json` are enough.
    cached = _cached_folder(repo_id, revision, ["config.json"], quantization)
    if cached is None:
        raise missing
    if may_download:
        logger.warning("The cached files of %s are used as they are: %s", repo_id, missing)
    return cached


def _cached_folder(
    repo_id: str, revision: str | None, needed: list[str], quantization: str
) -> Path | None:
    """Return the folder of the cached copy, without using the network.

    Returns `None` if the copy lacks weights or one of the `needed` files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    def find(patterns: list[str]) -> Path:
        found = snapshot_download(
            repo_id,
            revision=revision,
            local_files_only=True,
            allow_patterns=patterns,
            ignore_patterns=IGNORE_PATTERNS,
        )
        return Path(found)

    try:
        folder = find([f"*{quantization}*{SUFFIX}"] if quantization else needed)
        model = _gguf_in(folder, quantization) if quantization else _model_in(folder)
        if is_gguf(model):
            parts_of(model)
            return model
        weight_files(folder)
        if not (folder / SINGLE_FILE).is_file() and not (folder / INDEX_FILE).is_file():
            # The library knows from the hub's listing whether these are all weight files.
            find([*needed, "*.safetensors"])
    # (LocalEntryNotFoundError is an OSError.) An interrupted download has only some of the files.
    except (OSError, HFValidationError, StartupError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _download(repo_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=IGNORE_PATTERNS,
            )
        )
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{repo_id} (gated repository): accept its terms on the hub, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise RepositoryNotFound(
            repo_id,
            "neither a local folder nor a repository on the hub that this machine may read; check"
            " the name, or set HF_TOKEN if it is private",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(
            f"{repo_id} (revision {revision!r} not found): check the branch, tag or commit"
        ) from error
    except errors.HFValidationError as error:
        raise StartupError(
            f"{repo_id} is neither a folder nor a hub id of the form owner/name"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise RepositoryNotFound(
            repo_id,
            "no such local folder, it is not in the cache, and the hub cannot be reached; give a"
            " folder, or connect and unset HF_HUB_OFFLINE",
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(f"{repo_id} cannot be downloaded: {reason}") from error
