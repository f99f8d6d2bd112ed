"""Makes automatic choices, and records the reason of each for the log."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.launch.hardware import Hardware
from runtime.models.quantization.registry import ON_CPU


def check_experts(config: ServerConfig, model: ModelSpec) -> None:
    """Refuse options about experts if the model is not a mixture of experts.

    Raises:
        StartupError: the first such option; the message is one line.
    """
    if model.num_experts:
        return
    recorder = config.logging.expert_distribution_recorder_mode
    for option, is_given in (
        (f"--expert-distribution-recorder-mode {recorder}", recorder is not None),
        ("--enable-return-routed-experts", config.scheduling.enable_return_routed_experts),
    ):
        if is_given:
            raise StartupError(f"{option}: {model.architecture} has no experts.")


_NO_OUTPUT = "the model gives no tokens"
_NO_LIBRARY = "no library for it is installed; run pip install llguidance"


class GrammarChoice(NamedTuple):
    """The chosen library for structured output.

    Attributes:
        backend: name of the library; `none` if structured output is off.
        reason: why the library was chosen automatically, for the log; empty if the user chose it.
        why_none: why structured output is off and how to turn it on; empty if it is on.
    """

    backend: str
    reason: str = ""
    why_none: str = ""


def choose_grammars(config: ServerConfig, model: ModelSpec) -> GrammarChoice:
    """Choose the library for structured output.

    The choice depends on the user's option, the installed libraries, and the model.

    Raises:
        StartupError: the requested library is not installed.
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


_DTYPES = {"half": "float16", "float": "float32"}


def choose_dtype(
    config: ServerConfig, model: ModelSpec, device: str, hardware: Hardware, choices: Choices
) -> str:
    """Return the data type of weights and activations."""
    asked = config.model.dtype
    if asked != "auto":
        return _DTYPES.get(asked, asked)
    stored = model.dtype
    if device == "cpu":
        if stored == "float32":
            return str(choices.pick("dtype", "float32", "the checkpoint's"))
        if hardware.cpu_has_bf16:
            why = "the checkpoint's" if stored == "bfloat16" else f"for {stored} on this CPU"
            return str(choices.pick("dtype", "bfloat16", f"{why}; it has bfloat16 instructions"))
        why = f"this CPU has no fast {stored}; matrices stay in 16 bits"
        return str(choices.pick("dtype", "float32", why))
    if stored == "float32":
        return str(choices.pick("dtype", "bfloat16", "GPUs are slow at the checkpoint's float32"))
    return str(choices.pick("dtype", stored, "the checkpoint's"))


def check_quantization(config: ServerConfig, device: str, dtype: str) -> None:
    """Refuse a quantization for which the device or the data type has no kernels.

    Args:
        config: the options.
        device: `cpu` or `cuda`.
        dtype: data type of the activations.

    Raises:
        StartupError: there are no such kernels; the message is one line.
    """
    name = config.model.quantization
    if name not in ON_CPU:
        return
    if device != "cpu":
        raise StartupError(
            f"--quantization {name} runs on a CPU only, the model on {device}; on a GPU, "
            "--quantization fp8 needs half the memory of 16 bits."
        )
    if dtype == "float16":
        raise StartupError(
            f"--quantization {name} has no kernels for activations in float16; use --dtype "
            "bfloat16 or float32."
        )


def choose_kv_cache(
    config: ServerConfig,
    device: str,
    dtype: str,
    attention: str,
    model: ModelSpec,
    choices: Choices,
) -> str:
    """Return the data type of the KV cache, a name in `kernels.kv_forms`.

    `auto` uses the checkpoint's type if the model's attention applies the checkpoint's scales.

    Raises:
        StartupError: the device has no kernels for the requested type.
    """
    asked = config.kernels.kv_cache_dtype
    name = "bf16" if asked == "bfloat16" else asked
    if name == "bf16" and dtype == "bfloat16":
        return "auto"
    stored = "auto" if model.quantization is None else model.quantization.kv_cache_dtype
    if name == "auto" and stored != "auto" and attention != "flashinfer":
        if model.applies_kv_scales:
            return stored
        why = f"this model's attention does not apply the scales of the checkpoint's {stored}"
        return str(choices.pick("kv_cache_dtype", "auto", why))
    if device == "cpu" or name == "auto":
        return name
    if not name.startswith("fp8"):
        raise StartupError(
            f"--kv-cache-dtype {asked} runs on a CPU only, the model in {dtype} on {device}; "
            "use auto, fp8_e4m3 or fp8_e5m2."
        )
    if attention == "flashinfer":
        raise StartupError(
            f"--kv-cache-dtype {asked} does not work with --attention-backend flashinfer; omit "
            "one of the two."
        )
    return name


def keeps_16_bits(config: ServerConfig, model: ModelSpec, device: str, dtype: str) -> bool:
    """Whether weight matrices stay in 16 bits while activations are float32.

    With `--dtype float32`, the matrices become float32, so that a trainer's weight updates keep all
    their bits.
    """
    is_wide = device == "cpu" and dtype == "float32" and config.model.dtype == "auto"
    return is_wide and model.dtype in ("bfloat16", "float16") and model.quantization is None


def rounds_products(
    config: ServerConfig,
    model: ModelSpec,
    device: str,
    dtype: str,
    hardware: Hardware,
    choices: Choices,
) -> bool:
    """Whether float32 matrices are multiplied in bfloat16.

    This is only done for embedding models on a CPU, and only with `--dtype auto`.
    """
    wide = device == "cpu" and dtype == "float32" and config.model.dtype == "auto"
    if not wide or model.gives != "vectors" or not hardware.cpu_has_bf16:
        return False
    why = "vectors keep their direction to 1e-4, at twice the speed; not with --dtype float32"
    choices.pick("products", "bfloat16, summed in float32", why)
    return True


class Choices:
    """The automatic choices that were made, each with its reason.

    Attributes:
        lines: lines of the form "name: value (reason)", for the log.
    """

    def __init__(self) -> None:
        """Start without choices."""
        self.lines: list[str] = []

    def pick(self, name: str, value: Any, reason: str) -> Any:
        """Return `value`, and add a line with the reason, if there is one."""
        # Without a reason the user chose the value.
        if reason:
            self.lines.append(f"{name}: {value} ({reason})")
        return value


def choose_experts_backend(config: ServerConfig, device: str, choices: Choices) -> str:
    """Return the kernels for mixture-of-experts layers; on a CPU the option is ignored."""
    asked = config.kernels.moe_runner_backend
    if asked == "auto" or device == "cuda":
        return asked
    return str(choices.pick("moe_runner_backend", "auto", f"{asked} needs an NVIDIA device"))


def choose_context_len(config: ServerConfig, model: ModelSpec, choices: Choices) -> int:
    """Return the most tokens of a request, prompt and output together.

    Raises:
        StartupError: the option is larger than the model allows.
    """
    asked = config.model.context_length
    if asked is None:
        limit = model.text_limit
        if limit is not None and limit < model.context_len:
            return int(choices.pick("context_length", limit, "max_seq_length of the folder"))
        return int(choices.pick("context_length", model.context_len, "the model's"))
    if asked > model.context_len:
        raise StartupError(
            f"--context-length {asked} is more than the model's {model.context_len} tokens."
        )
    return asked
