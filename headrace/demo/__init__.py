"""The demo model: a toy checkpoint that ships with Headrace, made by `recipes/demo_model`.

Importing this package is free: no torch, no transformers, so the server's front may do it.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"

__all__ = ["MODEL_PATH"]
