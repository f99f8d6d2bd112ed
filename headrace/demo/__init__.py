"""The demo models: toy checkpoints that ship with Headrace, made by the recipes of the source tree.

Importing this package is free: no torch, no transformers, so the server's front may do it.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
VISION_MODEL_PATH: Path = Path(__file__).resolve().parent / "vision"

__all__ = ["MODEL_PATH", "VISION_MODEL_PATH"]
