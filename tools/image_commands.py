"""Carry out `docker/Dockerfile` without a container engine, and test the resulting image.

    sudo python -m tools.image_commands [--python PREFIX] [--keep FOLDER]

It replaces `docker build` and `docker run` on a machine that has neither. Each stage has a root
directory of its own: an overlay over this machine's file system, which stays unchanged. The
instructions `COPY`, `RUN`, `ENV` and `WORKDIR` are carried out in it. The entry point then runs as
the image's user, without privileges, in namespaces of its own. The test does what an operator would
do: it checks that the server does not start without keys, the health check, an answer, and a drain.

Not tested: the base image, and how an engine reads `HEALTHCHECK` and `EXPOSE`. This machine's
Python and C++ compiler replace the base image, so parts of commands that call `apt-get` are
skipped. `TORCH_BACKEND` is `none`: torch comes from the package index that pip is configured with.
Needs root and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
URL = "http://127.0.0.1:30000"
KEYS = {"HEADRACE_API_KEY": "client", "HEADRACE_ADMIN_API_KEY": "operator"}
_SKIPPED = ("apt-get", "rm -rf /var/lib/apt")


def instructions() -> list[tuple[str, str]]:
    """Return the name and the text of each instruction, without comments."""
    lines = [each for each in DOCKERFILE.read_text().splitlines() if not each.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, rest in pairs]


class Stage:
    """A stage of the build: a root directory, and the settings of the instructions so far."""

    def __init__(self, folder: Path, python: Path) -> None:
        """Mount an empty layer over this machine's file system at `folder`.

        Args:
            folder: where the layer is kept.
            python: prefix of the Python that stands in for the base image's.
        """
        self.python = python
        self.root, self.env, self.user, self.folder = folder / "root", dict[str, str](), "0:0", "/"
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)
        options = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.root], check=True)
        # The base image's Python is readable by everybody; root's home here may not be.
        for parent in python.parents:
            if parent != Path("/"):
                inside = self.root / parent.relative_to("/")
                inside.chmod(inside.stat().st_mode | 0o111)
        shutil.rmtree(self.root / "opt/headrace", ignore_errors=True)

    def inside(self, path: str) -> Path:
        """Return where a path of this stage is on this machine."""
        return self.root / (Path(self.folder) / path).relative_to("/")

    def command(self, command: list[str], extra: dict[str, str]) -> list[str]:
        """Return the command that runs `command` in this stage as its user, unprivileged."""
        uid, _, gid = self.user.partition(":")
        path = f"{self.python}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        env = {"PATH": path, **self.env, **extra}
        env["PATH"] = env["PATH"].replace("$PATH", path)
        home = "/root" if uid == "0" else self.folder
        drop = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
        drop += [] if uid == "0" else ["--bounding-set=-all", "--inh-caps=-all"]
        mounts = "mount -t proc proc /proc && mount -t devtmpfs dev /dev && cd $0 && exec $@"
        return [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"),
            *("chroot", str(self.root), "sh", "-c", mounts.replace("$@", '"$@"'), self.folder),
            *(drop if uid != "0" else []),
            *("env", "-u", "PYTHONPATH", f"HOME={home}"),
            *(f"{name}={value}" for name, value in env.items()),
            *command,
        ]

    def copy(self, words: list[str], stages: dict[str, Stage]) -> None:
        """Carry out a `COPY`, from the repository or from one of `stages`."""
        *sources, target = words
        where = ROOT
        if sources[0].startswith("--from="):
            where = stages[sources.pop(0).removeprefix("--from=")].root
        for source in sources:
            to = self.inside(target) / (Path(source).name if target.endswith("/") else "")
            to.parent.mkdir(parents=True, exist_ok=True)
            given = str(where / source.lstrip("/"))
            subprocess.run(["cp", "-a", "-T", given, str(to)], check=True)

    def users(self) -> set[int]:
        """Return the user ids of the processes that run in this stage."""
        found = set()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "root") == str(self.root):
                    found.add(folder.stat().st_uid)
        return found

    def run(self, line: str) -> None:
        """Carry out a `RUN` line, less its calls of apt."""
        parts = [each for each in re.split(r"\s*&&\s*", line) if not each.startswith(_SKIPPED)]
        subprocess.run(self.command(["sh", "-ec", " && ".join(parts)], {}), check=True)


def build(folder: Path, python: Path) -> tuple[Stage, list[str]]:
    """Carry out the file in `folder`; return the last stage and the entry point."""
    stages: dict[str, Stage] = {}
    stage, arguments, entry = None, dict[str, str](), list[str]()
    for name, rest in instructions():
        sys.stdout.write(f"{name} {rest[:100]}\n")
        if name == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = "none" if key == "TORCH_BACKEND" else value
        elif name == "FROM":
            title = rest.split()[-1] if " AS " in rest else "last"
            stage = stages[title] = Stage(folder / title, python)
        assert stage is not None or name == "ARG"
        if stage is None:
            continue
        if name == "ENV":
            for each in shlex.split(rest):
                key, _, value = each.partition("=")
                stage.env[key] = value
        elif name == "WORKDIR":
            stage.folder = rest
            stage.inside(".").mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            stage.user = rest
        elif name == "COPY":
            stage.copy(rest.split(), stages)
        elif name == "RUN":
            stage.env.update(arguments)
            stage.run(rest)
        elif name == "ENTRYPOINT":
            entry = json.loads(rest)
    assert stage is not None
    return stage, entry


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request with the client's key; return the parsed answer, or its text."""
    request = urllib.request.Request(
        URL + path,
        json.dumps(body).encode() if body else None,
        {"Authorization": f"Bearer {KEYS['HEADRACE_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else text.decode()


def try_out(stage: Stage, entry: list[str]) -> None:
    """Start the entry point as the image's user; raise if it does not do what an image must."""
    refused = subprocess.run(
        stage.command(entry, {}), capture_output=True, text=True, check=False, timeout=120
    )
    assert refused.returncode == 1, refused
    sys.stdout.write(f"without keys: {refused.stderr.strip().splitlines()[-1]}\n")
    server = subprocess.Popen(stage.command(entry, KEYS))
    try:
        started = time.monotonic()
        check = next(rest for name, rest in instructions() if name == "HEALTHCHECK")
        health = stage.command(json.loads(check[check.index("CMD") + 3 :]), {})
        while subprocess.run(health, capture_output=True, check=False).returncode:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() - started < 300, "the server is not healthy"
            time.sleep(1)
        sys.stdout.write(f"healthy after {time.monotonic() - started:.0f} s\n")
        found = ask("/v1/completions", {"prompt": "The river", "max_tokens": 8})
        sys.stdout.write(f"an answer: {found['choices'][0]['text']!r}\n")
        users = stage.users()
        assert users == {int(stage.user.partition(":")[0])}, users
        sys.stdout.write(f"its processes are those of user {users}\n")
    finally:
        # The first process of a namespace gets no signal that it does not handle: `sh` has been
        # replaced by the server.
        children = f"/proc/{server.pid}/task/{server.pid}/children"
        os.kill(int(Path(children).read_text().split()[0]), signal.SIGTERM)
        code = server.wait(timeout=90)
    assert code == 0, f"it ended with {code}"
    sys.stdout.write("it ended after SIGTERM with 0\n")


def main() -> None:
    """Build the image's stages, try the last one, and remove them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="build here, and leave the folder")
    parser.add_argument("--python", type=Path, default=Path(sys.base_prefix))
    options = parser.parse_args()
    keep = options.keep
    folder = Path(tempfile.mkdtemp(prefix="image-")) if keep is None else keep
    try:
        try_out(*build(folder, options.python))
    finally:
        for root in folder.glob("*/root"):
            subprocess.run(["umount", "-l", root], check=False)
        if keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
