"""How long texts an embedder takes, by the file that sentence-transformers writes. Front-safe."""

from __future__ import annotations

from pathlib import Path

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.json_file import Keys, read_json_object

# Named after the kind of model it was first written for.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
FILES = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)


def read_text_limit(folder: Path) -> int | None:
    """Tokens that the folder's texts are cut to, special ones included; `None` for as many as fit.

    Raises:
        StartupError: not such a number, or texts that have to be lowered ahead of the tokenizer.
    """
    for name in FILES:
        path = folder / name
        if path.is_file():
            keys = Keys(str(path), read_json_object(path))
            if keys.flag("do_lower_case", False):
                raise keys.error("do_lower_case", "false: the tokenizer's own files say it")
            return keys.integer("max_seq_length", MAX_WIDTH, 0) or None
    return None
