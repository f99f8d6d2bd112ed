"""Which library makes grammars, and what to say where none does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.errors import StartupError

_NO_OUTPUT = "the model gives no tokens"
_NO_LIBRARY = "no library for it is installed; run pip install llguidance"


class GrammarChoice(NamedTuple):
    """The back end of structured output.

    Attributes:
        backend: its name, `none` for none.
        reason: of an automatic choice, for the log; empty where it was asked for.
        why_none: why there is none, and how to mend it; empty where there is one.
    """

    backend: str
    reason: str = ""
    why_none: str = ""


def choose_grammars(config: ServerConfig, model: ModelSpec) -> GrammarChoice:
    """Choose by what was asked for, what is installed, and what the model can use.

    Raises:
        StartupError: the library that was asked for is not installed.
    """
    asked = config.kernels.grammar_backend
    if config.model.skip_tokenizer_init:
        why = "it was started with --skip-tokenizer-init"
        return GrammarChoice("none", "there is no tokenizer", why)
    if model.gives != "tokens":
        return GrammarChoice("none", _NO_OUTPUT, _NO_OUTPUT)
    if asked == "none":
        return GrammarChoice("none", why_none="it was started with --grammar-backend none")
    if asked == "auto":
        for name in ("xgrammar", "llguidance"):
            if find_spec(name) is not None:
                return GrammarChoice(name, "installed")
        return GrammarChoice("none", _NO_LIBRARY, f"{_NO_LIBRARY}, then start it again")
    if find_spec(asked) is None:
        package = "'headrace[grammar]'" if asked == "xgrammar" else asked
        raise StartupError(
            f"--grammar-backend {asked}: it is not installed; pip install {package}."
        )
    return GrammarChoice(asked)
