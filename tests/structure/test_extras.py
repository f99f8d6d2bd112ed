"""An extra is one folder: the table names it, both halves load, and no other code knows it."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.client.front_extras import FrontExtra, front_extra
from runtime.extras.device_extras import DeviceExtra
from runtime.requests.extra_spec import EXTRAS, load_half

ROOT = Path(__file__).resolve().parents[2]
# Rooms that carry extras unopened.
CARRIERS = ("runtime/scheduler", "runtime/text", "runtime/ipc", "runtime/client")


def test_every_folder_is_in_the_table() -> None:
    folders = {path.parent.name for path in (ROOT / "runtime" / "extras").glob("*/front.py")}
    assert folders == {path.rpartition(".")[2] for path in EXTRAS.values()}


@pytest.mark.parametrize("name", EXTRAS)
def test_both_halves_load(name: str) -> None:
    device = load_half(name, "device")
    assert isinstance(device, type)
    assert isinstance(device(), DeviceExtra)
    assert isinstance(front_extra(name), FrontExtra)


def test_the_front_halves_load_no_heavy_library() -> None:
    code = (
        "import sys\nfrom runtime.client.front_extras import front_extras\nfront_extras()\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize("room", CARRIERS)
def test_who_carries_an_extra_does_not_know_it(room: str) -> None:
    known = [
        (path.name, name)
        for path in (ROOT / room).rglob("*.py")
        for name in EXTRAS
        # An option of the server is named like what it allows.
        if name in path.read_text().replace(f"enable_return_{name}", "")
    ]
    assert known == []
