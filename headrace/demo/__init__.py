"""The demo models: toys that ship with Headrace, and a real model that `fetch.py` downloads.

The toys were made by the recipes of the source tree.
Importing this package loads no torch and no transformers, so the server's front may import it.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
VISION_MODEL_PATH: Path = Path(__file__).resolve().parent / "vision"

__all__ = ["MODEL_PATH", "VISION_MODEL_PATH"]
