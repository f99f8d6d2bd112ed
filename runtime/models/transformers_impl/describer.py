"""Describes a model of `transformers`, in a process of its own, as the front process has no torch.

`python -m runtime.models.transformers_impl.describer` reads a `Question` from its input and writes
an `Answer` to its output.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import msgspec
import torch

from runtime.errors import StartupError
from runtime.models.transformers_impl.description import Answer, Description, Question
from runtime.models.transformers_impl.layout import Layout, lay_out
from runtime.models.transformers_impl.traced import trace

# This limit is higher than any known model needs; see `runtime.checkpoint.config_keys`.
_MAX_POSITIONS = 2**27


def describe(architecture: str, values: dict[str, Any]) -> Description:
    """Build the model on the meta device, which needs no memory, and describe it.

    Args:
        architecture: name of the model's class.
        values: the content of `config.json`.

    Raises:
        StartupError: the model cannot be served; the message is one line.
    """
    return _described(architecture, msgspec.json.encode(values))


@cache
def _described(architecture: str, values: bytes) -> Description:
    import transformers

    layout = lay_out(trace(architecture, msgspec.json.decode(values)))
    model = layout.traced.model
    config = model.config
    context_len = getattr(config, "max_position_embeddings", None)
    if not isinstance(context_len, int) or not 0 < context_len <= _MAX_POSITIONS:
        raise StartupError(
            f"{architecture}: config.json does not say max_position_embeddings, which "
            "--model-impl transformers needs."
        )
    eos = config.eos_token_id
    base = model.base_model_prefix
    return Description(
        version=transformers.__version__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=model.get_input_embeddings().weight.shape[1],
        context_len=context_len,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        weights=list(layout.weights()),
        attention=layout.attention,
        prefix=f"{base}." if base else "",
        renames=layout.conversions.renames,
        num_idle=_num_idle(layout),
        aliases={f"{layout.head}.weight": f"{layout.embedding}.weight"} if layout.is_tied else {},
        ignored=_ignored(model),
        has_plan=bool(getattr(config, "base_model_tp_plan", None)),
        splits=_splits(layout),
        as_they_are=_as_they_are(layout),
    )


def _ignored(model: Any) -> list[str]:
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Buffers that old versions of transformers saved.
    rotary = r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
    return [*patterns, rotary, r"\.(attn|attention)\.(masked_)?bias$"]


def _splits(layout: Layout) -> list[tuple[int, str]]:
    sizes: dict[tuple[int, str], None] = {}
    products = [*layout.projections.values(), *(p for f in layout.fused for p in f.parts.values())]
    for product in products:
        if product.style == "column":
            sizes[product.out_features, f"{product.out_features} rows of {_last(product.name)}"] = (
                None
            )
        elif product.style == "packed":
            half = product.out_features // 2
            sizes[half, f"{half} rows of each half of {_last(product.name)}"] = None
        elif product.style == "row":
            sizes[
                product.in_features, f"{product.in_features} columns of {_last(product.name)}"
            ] = None
    for experts in layout.experts.values():
        sizes[experts.inner_size, f"{experts.inner_size} rows of an expert"] = None
    return list(sizes)


def _as_they_are(layout: Layout) -> list[str]:
    """Return the kinds of modules that none of our layers replaces, each kind once."""
    found: dict[str, None] = {}
    model = layout.traced.model
    if len(layout.quick) < len(layout.attention):
        call = next(each for each in layout.traced.calls if each.module not in layout.quick)
        found[f"{type(model.get_submodule(call.module)).__name__} (heads and rotation)"] = None
    for name in layout.other:
        owner = name.rpartition(".")[0]
        found[type(model.get_submodule(owner)).__name__] = None
    if layout.stream_norms is None:
        found[type(model.get_submodule(layout.traced.layers[0])).__name__] = None
    return list(found)


def _num_idle(layout: Layout) -> int:
    """Return the number of expert weights that one token does not use."""
    chosen = getattr(layout.traced.model.config, "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        return 0
    return sum(
        max(0, each.num_experts - chosen) * 3 * each.hidden_size * each.inner_size
        for each in layout.experts.values()
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def main() -> None:
    """Read a `Question` from standard input and write the `Answer` to standard output."""
    # Libraries may write to standard output. Their output goes to standard error instead, and the
    # answer to a copy of the original standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    torch.set_num_threads(1)
    try:
        answer = Answer(describe(question.architecture, msgspec.json.decode(question.values)))
    except StartupError as error:
        answer = Answer(error=error.message)
    answers.write(msgspec.json.encode(answer))
    answers.close()


if __name__ == "__main__":
    main()
