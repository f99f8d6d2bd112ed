"""The wheel holds the product and its run-time files, and no other folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.code_lines import PRODUCT

ROOT = Path(__file__).resolve().parents[2]
# Asks the build back end which files it would take, without building anything.
COLLECT = """
import json, os
from setuptools.dist import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files(["pyproject.toml"])
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
modules = [path for _, _, path in command.find_all_modules()]
data = [
    os.path.join(source, name)
    for _, source, _, names in command.get_data_files_without_manifest()
    for name in names
]
print(json.dumps(sorted(os.path.relpath(path) for path in modules + data)))
"""


@pytest.fixture(scope="module")
def files() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_wheel_holds_the_product_alone(files: set[str]) -> None:
    assert {path.split("/")[0] for path in files} == set(PRODUCT)


def test_of_the_demo_models_the_wheel_holds_what_is_served(files: set[str]) -> None:
    demo = {path for path in files if path.startswith("headrace/demo/")}
    models = {
        str(path.relative_to(ROOT))
        for name in ("model", "vision")
        for path in (ROOT / "headrace/demo" / name).iterdir()
    }
    assert demo == {"headrace/demo/__init__.py", "headrace/demo/fetch.py", *models}


def test_the_wheel_holds_every_module_and_what_is_read_at_run_time(files: set[str]) -> None:
    wanted = {
        str(path.relative_to(ROOT))
        for folder in PRODUCT
        for suffix in (".py", ".cpp", ".h", ".html", ".css", ".js", ".svg")
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }
    assert wanted | {"headrace/py.typed"} <= files
