"""The spec of a model that `transformers` builds, made from a description. Imports no torch.

The front process starts another process in which `transformers` builds the model on the meta device
and describes it. A process that has already imported torch describes the model itself.
"""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec

from runtime.checkpoint.config_keys import common_fields, read_architecture
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import LayerState, ModelSpec, WeightSpec
from runtime.config.registry import load_object
from runtime.errors import StartupError
from runtime.models.transformers_impl.description import Answer, Description, Question

logger = logging.getLogger(__name__)

_MODULE = "runtime.models.transformers_impl.describer"
_TIMEOUT_S = 300.0
_NAMES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
# Keys that the command line adds to those of `config.json`.
_OURS = ("model_impl", "quantization")


@dataclass(frozen=True, kw_only=True)
class AdaptedSpec(ModelSpec):
    """A model that `transformers` builds and our kernels compute.

    Attributes:
        described: the description of the model.
        values: the content of `config.json`, from which the model is built.
    """

    described: Description
    values: Mapping[str, Any]

    def _list_weights(self) -> Sequence[WeightSpec]:
        return self.described.weights

    @cached_property
    def layer_states(self) -> Sequence[LayerState]:
        """Return the state that each layer keeps between steps; see `ModelSpec`."""
        return tuple(each.state for each in self.described.attention)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(weight.name for weight in self.described.weights)

    def canonical(self, name: str) -> str:
        """Return the model's name for a checkpoint tensor; see `ModelSpec`.

        Old files have old names, and names in files without a head lack a prefix.
        """
        renamed = name
        for pattern, target in self.described.renames:
            renamed = re.sub(pattern, target, renamed)
        prefix = self.described.prefix
        for candidate in (name, renamed, prefix + name, prefix + renamed):
            if candidate in self._names:
                return candidate
        return name

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return a map from each tensor that repeats another tensor to that tensor."""
        return self.described.aliases

    def untied(self) -> AdaptedSpec:
        """Return this spec with a separate output head, if its head is tied to the embeddings."""
        values = {**self.values, "tie_word_embeddings": False}
        described = _ask(self.architecture, values)
        return replace(self, described=described, values=values, has_own_head=True)

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed; see `ModelSpec`."""
        if super().is_ignored(name):
            return True
        return any(re.search(pattern, f".{name}") for pattern in self.described.ignored)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token uses; see `ModelSpec`."""
        return self.num_parameters - self.described.num_idle

    def check(self, tp_size: int, *, deterministic: bool) -> None:
        """Refuse options that this model cannot be served with; see `ModelSpec`."""
        if tp_size > 1 and not self.described.has_plan:
            raise StartupError(
                f"--tp-size {tp_size}: {self.architecture} has no plan for ranks in transformers; "
                "use --dp-size for several GPUs."
            )
        if deterministic:
            raise StartupError(
                f"--enable-deterministic-inference: {self.architecture} runs by its own code in "
                "transformers, whose results may depend on the batch."
            )

    def uneven_parts(self, tp_size: int, ep_size: int = 1) -> list[str]:  # noqa: ARG002  # no experts
        """Return the parts that ranks cannot share evenly; see `ModelSpec`."""
        parts = [what for each in self.described.attention for what in each.uneven_parts(tp_size)]
        parts += [what for size, what in self.described.splits if size % tp_size]
        return list(dict.fromkeys(parts))


def read(config: Keys, generation: Keys) -> AdaptedSpec:
    """Describe the model of a `config.json` and return its spec.

    Raises:
        StartupError: `transformers` does not know the model, or it cannot be served; the message is
            one line.
    """
    architecture = read_architecture(config)
    values = {key: value for key, value in config.values.items() if key not in _OURS}
    described = _ask(architecture, values)
    found = {
        **values,
        "vocab_size": described.vocab_size,
        "hidden_size": described.hidden_size,
    }
    found.setdefault("eos_token_id", described.eos_token_ids)
    found.setdefault("bos_token_id", described.bos_token_id)
    fields = {**common_fields(Keys(config.source, found), generation), "raw": config.values}
    return AdaptedSpec(
        **fields,
        context_len=described.context_len,
        impl="transformers",
        described=described,
        values=values,
    )


@cache
def known_architectures() -> frozenset[str]:
    """Return the names of the decoders in the installed `transformers`, from its source files."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == _NAMES:
            strings = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            return frozenset(each for each in strings if isinstance(each, str))
    return frozenset()


def _ask(architecture: str, values: Mapping[str, Any]) -> Description:
    if "torch" in sys.modules:
        describe = cast(
            "Callable[[str, dict[str, Any]], Description]", load_object(f"{_MODULE}:describe")
        )
        return describe(architecture, dict(values))
    return _answer(architecture, msgspec.json.encode(values))


@cache
def _answer(architecture: str, values: bytes) -> Description:
    logger.info("Asking transformers to describe %s", architecture)
    question = msgspec.json.encode(Question(architecture, msgspec.Raw(values)))
    try:
        done = subprocess.run(
            # -P keeps the current folder off the path: it may hold another `runtime`.
            [sys.executable, "-P", "-m", _MODULE],
            input=question,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        answer = msgspec.json.decode(done.stdout, type=Answer)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"transformers took more than {_TIMEOUT_S:.0f} s to build it") from error
    except msgspec.DecodeError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise StartupError(
            f"{architecture}: the process that describes it failed: {''.join(last)}"
        ) from error
    if answer.description is None:
        raise StartupError(answer.error)
    return answer.description
