"""`python -m tools.compare_layers MODEL` compares our model with `transformers`, layer by layer.

Both models get the same weights, unless `--reference` names others, and the same random tokens. The
table shows for each stage of a layer the difference from the same stage in `transformers`. If a
stage differs by more than the tolerance, the first such stage is named, and the exit status is 1.
Later stages inherit its error, so examine this stage:

        attention  the heads' output, before the output product: q/k/v, norms, rotation, mask, scale
    o_proj     the output product
    mlp        the feed-forward block
        output     the residual stream after the layer: includes the norms between the blocks
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.linear import GATED_TOKENS
from runtime.checkpoint.hub import resolve_model_folder
from runtime.errors import StartupError
from runtime.executor.kv_pool import allocate_kv
from runtime.executor.memory import PoolSize
from runtime.models.attention.backend import ATTENTION_BACKENDS, DEFAULT_ATTENTION, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch, StateSteps
from runtime.models.decoder.model import DecoderForCausalLM, DecoderLayer
from runtime.models.layers.build_context import BuildContext, parse_dtype
from runtime.models.registry import read_model_spec
from runtime.weights.load_model import load_model

# The largest error that is accepted, relative to the largest number in the token's row. In 16 bits
# both models round, each in its own order, and the errors of many layers add up.
TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
PAGE_SIZE = 16

# The output of each stage, in order: from a name such as `layers.1 mlp` to a tensor
# `[num_tokens, width]`, float32, on the CPU.
Stages = dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The error of one stage.

    Attributes:
        relative: the largest error of a token, relative to the largest number in the token's row.
        absolute: the largest absolute error.
        token: index of the token with the largest relative error.
    """

    stage: str
    relative: float
    absolute: float
    token: int


class RecordedLayer:
    """Wraps a layer of our model, and records the outputs of its parts."""

    def __init__(self, layer: DecoderLayer, name: str, stages: Stages) -> None:
        """Wrap `layer`; its outputs are recorded in `stages` under names that begin with `name`."""
        self._layer = layer
        self._name = name
        self._stages = stages

    def attend(self, hidden: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """See `runtime.models.decoder.model.DecoderLayer`."""
        if hidden is None:
            _keep(self._stages, "embeddings", residual)
        attended = self._layer.attend(hidden, residual, batch)
        _keep(self._stages, f"{self._name} attention", attended)
        _keep(self._stages, f"{self._name} o_proj", self._layer.self_attn.o_proj.apply(attended))
        return attended

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """See `runtime.models.decoder.model.DecoderLayer`."""
        mlp = self._layer.mlp
        stage = f"{self._name} mlp"
        recorded: Any = _RecordedMLP(mlp.forward, lambda x: _keep(self._stages, stage, x))
        self._layer.mlp = recorded
        try:
            hidden = self._layer.finish(attended, residual)
        finally:
            self._layer.mlp = mlp
        # Our residual stream lacks the layer's last output until the next norm adds it.
        _keep(self._stages, f"{self._name} output", hidden + residual)
        return hidden


@dataclass(frozen=True)
class _RecordedMLP:
    compute: Callable[[Tensor], Tensor]
    keep: Callable[[Tensor], None]
    # The norm before the block must return floats, even if the block could take rounded numbers.
    rounding: None = None

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.compute(hidden)
        self.keep(result)
        return result


def our_stages(
    folder: Path, tokens: Sequence[int], dtype: str, device: str = "cpu", backend: str | None = None
) -> Stages:
    """Run our model on `tokens` in one step, and return the output of each stage.

    Raises:
        StartupError: the model cannot be loaded, or does not consist of `DecoderLayer`s.
    """
    spec = read_model_spec(folder)
    context = BuildContext(dtype=parse_dtype(dtype), device=torch.device(device))
    model = load_model(folder, spec, context, lambda _: None)
    if not isinstance(model, DecoderForCausalLM):
        raise StartupError(f"{spec.architecture} is not made of decoder layers that are known here")
    stages: Stages = {}
    layers: list[Any] = [
        RecordedLayer(layer, f"layers.{layer_idx}", stages)
        for layer_idx, layer in enumerate(model.model.layers)
    ]
    model.model.layers = layers
    with torch.inference_mode():
        batch = _one_prompt(model, tokens, backend or DEFAULT_ATTENTION[context.device.type])
        normed = model.forward(batch)
        _keep(stages, "norm", normed)
        _keep(stages, "logits", model.compute_logits(normed))
    return stages


def _one_prompt(model: DecoderForCausalLM, tokens: Sequence[int], backend: str) -> ForwardBatch:
    """Return the batch of a step that computes one whole prompt, planned for attention."""
    device, length = model.context.device, len(tokens)
    num_pages = -(-length // PAGE_SIZE)
    attention = ATTENTION_BACKENDS.load(backend)(
        device.type, StepLimits(max_seqs=1, max_tokens=max(length, GATED_TOKENS))
    )

    def ints(values: Sequence[int] | range, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    batch = ForwardBatch(
        input_ids=ints(tokens),
        positions=ints(range(length)),
        # Page 0 is for padding.
        slots=ints(range(PAGE_SIZE, PAGE_SIZE + length)),
        qo_indptr=ints([0, length], torch.int32),
        seq_lens=ints([length], torch.int32),
        page_table=ints(range(1, num_pages + 1), torch.int32)[None],
        num_decodes=int(length == 1),
        logits_indices=None,
        kv=allocate_kv(PoolSize(num_pages, PAGE_SIZE, 0), model.spec, model.context),
        attention=attention,
        states=StateSteps(
            reads=ints([0]),
            save_indptr=ints([0, 1], torch.int32),
            save_ends=ints([length]),
            save_seqs=ints([0]),
            # The slot for padding.
            save_slots=ints([1]),
            is_decode=length == 1,
        ),
    )
    attention.plan(batch)
    return batch


def their_stages(folder: Path, tokens: Sequence[int], dtype: str, device: str = "cpu") -> Stages:
    """Run the model of `transformers` on `tokens`, and return the output of each stage."""
    import transformers

    sees = read_model_spec(folder).vision is not None
    kind = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=parse_dtype(dtype))
    model = model.to(device).eval()
    decoder = model.model.language_model if sees else model.model
    stages: Stages = {}

    def keep(stage: str) -> Callable[..., None]:
        return lambda _, __, output: _keep(stages, stage, _first(output))

    def keep_input(stage: str) -> Callable[..., None]:
        return lambda _, inputs: _keep(stages, stage, inputs[0])

    decoder.embed_tokens.register_forward_hook(keep("embeddings"))
    for layer_idx, layer in enumerate(decoder.layers):
        name = f"layers.{layer_idx}"
        is_linear = hasattr(layer, "linear_attn")
        o_proj = layer.linear_attn.out_proj if is_linear else layer.self_attn.o_proj
        o_proj.register_forward_pre_hook(keep_input(f"{name} attention"))
        o_proj.register_forward_hook(keep(f"{name} o_proj"))
        layer.mlp.register_forward_hook(keep(f"{name} mlp"))
        layer.register_forward_hook(keep(f"{name} output"))
    decoder.norm.register_forward_hook(keep("norm"))
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)], device=device), use_cache=False).logits
    _keep(stages, "logits", logits)
    return stages


def _first(output: Any) -> Tensor:
    # Some layers also return their attention weights.
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _keep(stages: Stages, stage: str, value: Tensor) -> None:
    # The value is copied, because both models later change some of these tensors in place.
    stages[stage] = value.detach().reshape(-1, value.shape[-1]).float().cpu().clone()


def compare(ours: Stages, theirs: Stages) -> list[Difference]:
    """Return the error of each stage of `ours` against `theirs`, in the order of computation.

    Raises:
        ValueError: the models have different stages, or a stage has different shapes.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"stages of one side only: {sorted(ours.keys() ^ theirs.keys())}")
    differences = []
    for stage, expected in theirs.items():
        found = ours[stage]
        if found.shape != expected.shape:
            raise ValueError(f"{stage}: {list(found.shape)}, not {list(expected.shape)}")
        error = (found - expected).abs().amax(dim=1)
        scale = expected.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        # NaN counts as an infinite error.
        relative = (error / scale).nan_to_num(nan=torch.inf)
        token = int(relative.argmax())
        differences.append(Difference(stage, float(relative[token]), float(error.max()), token))
    return differences


def first_beyond(differences: Sequence[Difference], tolerance: float) -> Difference | None:
    """Return the first stage whose error exceeds `tolerance`."""
    return next((each for each in differences if each.relative > tolerance), None)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of this tool."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_layers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument(
        "--reference", metavar="MODEL", help="what transformers loads, when not the same"
    )
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="random tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32")
    parser.add_argument("--device", choices=list(DEFAULT_ATTENTION), default="cpu")
    parser.add_argument("--attention-backend", choices=list(ATTENTION_BACKENDS))
    parser.add_argument("--tolerance", type=float, help="relative; the type's when absent")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the result, and return the exit status.

    The status is 1 if a stage differs, and 2 if the models could not be compared.
    """
    options = build_parser().parse_args(argv)
    tolerance = options.tolerance or TOLERANCES[options.dtype]
    try:
        folder = resolve_model_folder(options.model)
        spec = read_model_spec(folder)
        if not 0 < options.prompt_len <= spec.context_len:
            raise StartupError(f"--prompt-len must be in [1, {spec.context_len}]")
        generator = torch.Generator().manual_seed(options.seed)
        tokens = torch.randint(spec.vocab_size, (options.prompt_len,), generator=generator).tolist()
        ours = our_stages(folder, tokens, options.dtype, options.device, options.attention_backend)
        reference = resolve_model_folder(options.reference) if options.reference else folder
        theirs = their_stages(reference, tokens, options.dtype, options.device)
    except StartupError as error:
        print(f"compare_layers: {error.message}", file=sys.stderr)
        return 2
    differences = compare(ours, theirs)
    first = first_beyond(differences, tolerance)
    print(f"{'stage':<24} {'relative':>10} {'absolute':>10}  token")
    for each in differences:
        mark = "  <-- first beyond the tolerance" if each is first else ""
        print(
            f"{each.stage:<24} {each.relative:>10.2e} {each.absolute:>10.2e}  {each.token:>5}{mark}"
        )
    if first is None:
        print(f"All stages agree within {tolerance:g}.")
        return 0
    print(
        f"{first.stage} is the first that differs: {first.relative:.2e} at token {first.token}, "
        f"{first.absolute:.2e} at most, tolerance {tolerance:g}."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
