"""Describes machine, versions, commit and options of a measurement, without importing torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime.launch.assemble import server_version

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "numpy")


def describe_environment() -> dict[str, Any]:
    """Return machine, versions and commit, without the names of users or folders."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "headrace": server_version(),
        "commit": _commit(),
        "packages": _versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def environment_line(environment: Mapping[str, Any]) -> str:
    """Format the environment as one line for the terminal."""
    machine = (
        ", ".join(environment["gpus"]) or f"{environment['cpu']}, {environment['cores']} cores"
    )
    versions = " ".join(f"{name} {text}" for name, text in environment["packages"].items())
    return f"{machine}; headrace {environment['headrace']} ({environment['commit']}); {versions}"


def options_of(options: Any) -> dict[str, Any]:
    """Return options as JSON values, without API keys and without the folders of paths."""
    plain = {}
    for name, value in vars(options).items():
        if name == "api_key":
            continue
        plain[name] = value.name if isinstance(value, Path) else value
    return plain


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to a file as indented JSON; create the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinity, so it is written `inf`, as in the option.
        return round(value, 6) if abs(value) != float("inf") else "inf"
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = _output(command)
    return [" driver ".join(part.strip() for part in line.split(",")) for line in output]


def _commit() -> str:
    lines = _output(["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"])
    if not lines:
        return "unknown"
    changed = _output(["git", "-C", str(_ROOT), "status", "--porcelain", "-uno"])
    return lines[0] + ("+changes" if changed else "")


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _output(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
