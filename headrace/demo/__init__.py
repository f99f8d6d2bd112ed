"""The demo models: tiny models ("toys") in the package, and a model that `fetch.py` downloads.

The folder `recipes/` of the repository contains the programs that trained the toys. Importing this
package does not import torch or transformers, so the server's front process may import it.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
VISION_MODEL_PATH: Path = Path(__file__).resolve().parent / "vision"

__all__ = ["MODEL_PATH", "VISION_MODEL_PATH"]
