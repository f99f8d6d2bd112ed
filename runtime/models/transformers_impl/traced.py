"""Builds a model of `transformers` on the meta device, and records one step through its modules.

The keys of `config.json` do not suffice to describe a layer's attention, because each model has
keys of its own. The calls of the attention interface during one forward pass do. Tensors on the
meta device take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import StartupError

# The names of our functions in the attention interface: while serving, and while tracing a step.
SERVING, TRACING = "headrace", "headrace_trace"
_NUM_TOKENS = 3
# Rotations whose frequencies depend on the longest sequence of a step.
CHANGING_ROTATIONS = ("dynamic", "longrope")
# Arguments of a call of the interface that do not change its result.
_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "is_causal"}
_NO_INTERFACE = "it does not use the attention interface of transformers"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Rotary:
    """A module that computes cosines and sines of positions.

    Attributes:
        module: name of the module.
        options: arguments of the module besides the positions, such as a type of layer.
        width: number of cosines per token.
    """

    module: str
    options: tuple[tuple[str, Any], ...]
    width: int


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention interface.

    Attributes:
        module: name of the calling module.
        num_heads, num_kv_heads, head_dim, value_dim: sizes over all ranks together.
        window: maximum number of keys that a query attends to, with its own; `None` for all.
        sinks: name of the module's parameter with a sink score for each head; empty if it has no
            sinks.
        rotary: the rotary module whose result the calling module received; `None` if it received
            none.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: str = ""
    rotary: Rotary | None = None


@dataclass
class Traced:
    """A model on the meta device, and the record of one step.

    Attributes:
        model: the model, with its parameters on the meta device.
        calls: calls of the attention interface, in order.
        layers: names of the layers that made these calls, in the same order.
        is_chain: whether each layer's input is the tensor that the previous layer returned.
        can_be_one: whether the model's code also runs with a single layer.
        norm: name of the module whose input is the last layer's output; empty if there is no such
            module.
    """

    model: Any
    calls: list[AttentionCall] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    is_chain: bool = False
    can_be_one: bool = False
    norm: str = ""


def trace(architecture: str, values: dict[str, Any]) -> Traced:
    """Build the model on the meta device and record one step.

    Args:
        architecture: name of the model's class.
        values: the content of `config.json`.

    Raises:
        StartupError: `transformers` does not know the model, or a part of it cannot be served; the
            message says which.
    """
    return _Trace(architecture, build_on_meta(architecture, values)).run()


def build_on_meta(architecture: str, values: dict[str, Any]) -> Any:
    """Build the model of `transformers` on the meta device, where it takes no memory.

    Raises:
        StartupError: the model cannot be built.
    """
    import transformers

    try:
        from transformers import CONFIG_MAPPING, initialization
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise refused(
            architecture, f"transformers {transformers.__version__} is too old: update it"
        ) from error
    for name in (SERVING, TRACING):
        ALL_ATTENTION_FUNCTIONS.register(name, _attend)
    ALL_EXPERTS_FUNCTIONS.register(SERVING, _through_experts)
    ALL_MASK_ATTENTION_FUNCTIONS.register(TRACING, _mask)
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING or not hasattr(transformers, architecture):
        raise refused(architecture, f"transformers {transformers.__version__} does not know it")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(
            {key: value for key, value in values.items() if key != "quantization_config"}
        )
        with torch.device("meta"), initialization.no_init_weights():
            model = getattr(transformers, architecture)._from_config(
                config,
                dtype=torch.get_default_dtype(),
                attn_implementation=TRACING,
                experts_implementation=SERVING,
            )
    except KeyError as error:
        if error.args != (TRACING,):
            raise refused(architecture, f"transformers cannot build it: {error!r}") from error
        raise refused(architecture, _NO_INTERFACE) from error
    except Exception as error:
        raise refused(architecture, f"transformers cannot build it: {_first(error)}") from error
    model.eval()
    for module in model.modules():
        if getattr(module, "rope_type", None) in CHANGING_ROTATIONS:
            # The decorated `forward` would change frequencies by the longest position of a step.
            plain: Any = getattr(type(module).forward, "__wrapped__", type(module).forward)
            module.forward = plain.__get__(module)
        # The model's check for padding would read token ids on the host.
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing
    return model


class _Watched(Tensor):
    """A tensor of positions that counts how often the model's code uses it."""

    num_uses = 0

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the use; the result is a plain tensor."""
        cls.num_uses += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Trace:
    """Records one step of a model."""

    def __init__(self, architecture: str, model: Any) -> None:
        self.architecture = architecture
        self.found = Traced(model)
        self.names: dict[nn.Module, str] = {
            module: name for name, module in model.named_modules(remove_duplicate=True)
        }
        self.windows: dict[int, int | None] = {}
        # References that keep tensors alive, because their ids are keys.
        self.kept: list[Any] = []
        self.rotaries: dict[int, Rotary] = {}
        self.got_rotary: dict[str, Rotary] = {}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Any] = {}

    def run(self) -> Traced:
        model = self.found.model
        self._check_kind()
        self._step()
        self._find_layers()
        if not _Watched.num_uses:
            raise self.refused("it computes the positions of tokens itself")
        self._try_one_layer()
        # From here on the model makes no masks: our kernels know which keys a query sees.
        model.config._attn_implementation = SERVING
        return self.found

    def _step(self) -> None:
        """Run one step on the meta device with hooks that record it."""
        tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
        positions = torch.zeros_like(tokens).as_subclass(_Watched)
        _Watched.num_uses = 0
        with self._followed(), torch.inference_mode():
            try:
                self.found.model(
                    input_ids=tokens,
                    position_ids=positions,
                    # Without a mask, some models look for padding in the ids.
                    attention_mask=torch.ones_like(tokens),
                    use_cache=False,
                )
            except StartupError:
                raise
            except Exception as error:
                raise self.refused(f"a step cannot be followed: {_first(error)}") from error

    def _try_one_layer(self) -> None:
        """Set `found.can_be_one`: whether the model's code runs with the first layer alone."""
        found = self.found
        among, _, _ = found.layers[0].rpartition(".")
        parent, _, name = among.rpartition(".")
        owner, calls = found.model.get_submodule(parent), list(found.calls)
        layers = getattr(owner, name)
        setattr(owner, name, nn.ModuleList([layers[0]]))
        try:
            self._step()
            found.can_be_one = len(found.calls) == len(calls) + 1
        except StartupError:
            found.can_be_one = False
        finally:
            setattr(owner, name, layers)
            found.calls[:] = calls

    def refused(self, why: str) -> StartupError:
        return refused(self.architecture, why)

    def _check_kind(self) -> None:
        model, config = self.found.model, self.found.model.config
        if getattr(model, "_is_stateful", False):
            raise self.refused("its layers keep a recurrent state")
        if getattr(config, "is_encoder_decoder", False):
            raise self.refused("it has an encoder")
        kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if kinds:
            raise self.refused(f"its layers have {', '.join(sorted(kinds))}")
        if getattr(config, "alibi", False):
            raise self.refused("its positions are biases of the scores (alibi)")

    @contextmanager
    def _followed(self) -> Iterator[None]:
        hooks = []
        for module, name in self.names.items():
            module.headrace_attend = self._attend  # type: ignore[assignment]
            hooks.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            hooks.append(
                module.register_forward_hook(self._leaving(name, module), with_kwargs=True)
            )
        _MASKS.append(self._mask)
        try:
            yield
        finally:
            _MASKS.pop()
            for hook in hooks:
                hook.remove()
            for module in self.names:
                del module.headrace_attend

    def _entering(self, name: str) -> Callable[..., None]:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if isinstance(hidden, Tensor):
                self.inputs[name] = hidden
            for each in given:
                first = each[0] if isinstance(each, tuple) and each else each
                if id(first) in self.rotaries:
                    self.got_rotary[name] = self.rotaries[id(first)]

        return note

    def _leaving(self, name: str, module: nn.Module) -> Callable[..., None]:
        buffers = module.named_buffers(recurse=False)
        is_rotary = any(buffer.endswith("inv_freq") for buffer, _ in buffers)

        def note(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            self.outputs[name] = output
            self.kept.append(output)
            if is_rotary and isinstance(output, tuple):
                given = signature(module.forward).bind(*args, **kwargs).arguments
                plain = {key: value for key, value in given.items() if isinstance(value, str)}
                options = tuple(sorted(plain.items()))
                self.rotaries[id(output[0])] = Rotary(name, options, output[0].shape[-1])

        return note

    def _mask(self, local_size: int | None, mask: Tensor) -> Tensor:
        self.windows[id(mask)] = local_size
        self.kept.append(mask)
        return mask

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, None]:
        name = self.names[module]
        is_causal = options.pop("is_causal", None)
        if getattr(module, "is_causal", True) is False or is_causal is False:
            raise self.refused("its tokens see later tokens")
        window = options.pop("sliding_window", None)
        if mask is not None:
            if id(mask) not in self.windows:
                raise self.refused("its mask or its positions have a form that is not supported")
            if self.windows[id(mask)] not in (None, window):
                raise self.refused("its attention does not state the window that its mask has")
        sinks = options.pop("s_aux", None)
        scale = options.pop("scaling", None)
        softcap = options.pop("softcap", None)
        unknown = sorted(
            key
            for key, given in options.items()
            if key not in _HARMLESS and (isinstance(given, Tensor) or given)
        )
        if unknown:
            raise self.refused(f"its attention needs {', '.join(unknown)}")
        heads, value_dim = query.shape[1], value.shape[-1]
        if heads % key.shape[1] or key.shape[-1] != query.shape[-1] or value_dim > key.shape[-1]:
            raise self.refused("the shapes of its heads are unusual")
        self.found.calls.append(
            AttentionCall(
                name,
                heads,
                key.shape[1],
                key.shape[-1],
                value_dim,
                query.shape[-1] ** -0.5 if scale is None else float(scale),
                window,
                softcap or 0.0,
                _parameter_name(module, sinks),
                self.got_rotary.get(name),
            )
        )
        shape = (*query.shape[:1], query.shape[2], heads, value_dim)
        return query.new_empty(shape), None

    def _find_layers(self) -> None:
        found, config = self.found, self.found.model.config
        if not found.calls:
            raise self.refused(_NO_INTERFACE)
        wanted = getattr(config, "num_hidden_layers", len(found.calls))
        layers = [_layer_of(found.model, call.module) for call in found.calls]
        if len(set(layers)) != len(layers) or len(layers) != wanted or "" in layers:
            raise self.refused("not every layer attends exactly once")
        found.layers = layers
        outputs = [self._hidden(self.outputs[name]) for name in layers]
        inputs = [self.inputs.get(name) for name in layers]
        found.is_chain = all(
            mine is theirs for mine, theirs in zip(inputs[1:], outputs, strict=False)
        )
        for name, given in self.inputs.items():
            is_below = any(name == layer or name.startswith(f"{layer}.") for layer in layers)
            if given is outputs[-1] and not is_below:
                found.norm = name
                break

    @staticmethod
    def _hidden(output: Any) -> Any:
        return output[0] if isinstance(output, tuple) else output


# The functions that make masks get no reference to the model, so they find the trace here.
_MASKS: list[Callable[[int | None, Tensor], Tensor]] = []


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention; a function for the attention interface of `transformers`.

    Args:
        module: the attention of one layer.
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: `[1, num_kv_heads, num_tokens, value_dim]`.
        attention_mask: `None`, except while a step is traced.
        options: scale, window and others.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and `None` in place of attention weights.
    """
    attend: Any = module.headrace_attend
    result: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, options)
    return result


def _through_experts(_experts: nn.Module, hidden: Tensor, *_chosen: Any, **_kwargs: Any) -> Tensor:
    """Return a tensor of the shape of the experts' result; only used while tracing.

    Later our experts replace the module.
    """
    return torch.empty_like(hidden)


def _mask(
    batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, **_others: Any
) -> Tensor:
    """Make a mask without content while tracing, and note its window."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    return _MASKS[-1](local_size, mask)


def _layer_of(model: nn.Module, name: str) -> str:
    """Return the name of the layer, in a module list, that contains module `name`; else empty."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:length])), nn.ModuleList):
            return ".".join(parts[: length + 1])
    return ""


def _parameter_name(module: nn.Module, tensor: Tensor | None) -> str:
    if tensor is None:
        return ""
    names = [name for name, each in module.named_parameters() if each is tensor]
    if not names:
        raise StartupError(f"{type(module).__name__} computes the scores of its sinks")
    return names[0]


def refused(architecture: str, why: str) -> StartupError:
    """Return the error that refuses a model, with the reason `why`."""
    return StartupError(f"{architecture} cannot be served by --model-impl transformers: {why}.")


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(". ")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass
