"""Makes an environment for each client, because their newest versions' dependencies conflict.

Each is a virtual environment that sees the packages of the environment that makes it, including
torch. It holds only the packages that `requirements/CLIENT.txt` adds or replaces.
`CLIENT.no-deps.txt` names packages that are installed without dependencies, because their
dependencies would replace half of the rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.server import ROOT

REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = ROOT / ".venv-clients"
NO_DEPS = ".no-deps"


def clients() -> list[str]:
    """Names of all clients; `openai@1` has the tests of `openai` and another version."""
    names = [path.stem for path in REQUIREMENTS.glob("*.txt")]
    return sorted(name for name in names if not name.endswith(NO_DEPS) and name != "constraints")


def python_of(client: str) -> Path:
    """The interpreter of its environment."""
    return ENVIRONMENTS / client / "bin" / "python"


def prepare(client: str) -> None:
    """Make the environment of `client`, unless it is there and its requirements are the same."""
    files = [REQUIREMENTS / f"{client}.txt", REQUIREMENTS / f"{client}{NO_DEPS}.txt"]
    files = [path for path in files if path.exists()]
    wanted = "".join(path.read_text() for path in files) + sys.version
    mark = ENVIRONMENTS / client / "installed"
    if mark.exists() and mark.read_text() == wanted:
        return
    print(f"Installing {client}", flush=True)
    shutil.rmtree(ENVIRONMENTS / client, ignore_errors=True)
    venv.create(ENVIRONMENTS / client)
    own = sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENTS / client)})
    # `addsitedir` also follows the `.pth` files there: an editable install is one.
    shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(own) / "shared.pth").write_text(shared)
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(client)), "install", "--quiet"]
    for path in files:
        options = ["--no-deps"] if path.stem.endswith(NO_DEPS) else []
        limits = ["--constraint", str(REQUIREMENTS / "constraints.txt")]
        subprocess.run([*pip, *options, *limits, "--requirement", str(path)], check=True)
    mark.write_text(wanted)


def version_of(client: str) -> str:
    """Name and version of the package that the client is: the first line of its last file."""
    alone = REQUIREMENTS / f"{client}{NO_DEPS}.txt"
    path = alone if alone.exists() else REQUIREMENTS / f"{client}.txt"
    code = (
        "import sys; from importlib.metadata import version;"
        "from packaging.requirements import Requirement;"
        "name = Requirement(sys.argv[1]).name; print(name, version(name))"
    )
    command = [str(python_of(client)), "-c", code, path.read_text().splitlines()[0]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
