"""The demo models, which `--model-path` finds by name without a hub. No torch.

`demo` is SmolLM2-135M-Instruct if it has been fetched (`headrace/demo/fetch.py`, which
`make install` runs). Otherwise it is the toy model; toy models are part of the package.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kernels.cpu.build import cache_dir
from runtime.errors import StartupError

logger = logging.getLogger(__name__)

DEMO_NAME = "demo"
TOY_NAME = "demo-toy"
INSTRUCT_NAME = "SmolLM2-135M-Instruct"
INSTRUCT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The sampling parameters that the model's authors recommend, which its file does not have.
INSTRUCT_SAMPLING = '{"temperature": 0.2, "top_p": 0.9}'

# The demo folder beside this package, found without importing `headrace`.
_BUNDLED = Path(__file__).resolve().parents[2] / "headrace" / "demo"
TOY_FOLDER = _BUNDLED / "model"
TOYS = {TOY_NAME: TOY_FOLDER, "demo-vision": _BUNDLED / "vision"}
DEMO_NAMES = frozenset({DEMO_NAME, INSTRUCT_NAME, *TOYS})
_FETCH = "`python -m headrace.demo.fetch` fetches it"


def fetched_models() -> Path:
    """Return the folder of fetched models: `models` in the user's cache folder."""
    return cache_dir() / "models"


def find_demo(name: str) -> tuple[str, Path]:
    """Find a demo model by its name, one of `DEMO_NAMES`.

    Returns:
        The name of the model that is served, and its folder or file. For `demo`, the name is that
        of the model for which `demo` stands.

    Raises:
        StartupError: the model is not installed.
    """
    file = fetched_models() / INSTRUCT_FILE
    if name == DEMO_NAME and not file.is_file():
        logger.warning(
            "%s has not been fetched: there is no %s. Serving the bundled toy, which knows little "
            "more than capitals and small sums. %s.",
            INSTRUCT_NAME,
            file,
            _FETCH,
        )
        name = TOY_NAME
    if name in (DEMO_NAME, INSTRUCT_NAME):
        if not file.is_file():
            raise StartupError(f"{name}: there is no {file}; {_FETCH}")
        return INSTRUCT_NAME, file
    folder = TOYS[name]
    if not (folder / "config.json").is_file():
        raise StartupError(f"{name}: this demo model is not installed; there is no {folder}")
    return name, folder
