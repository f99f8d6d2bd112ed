"""OLMo 3's `config.json`: OLMo 2 with a window on most layers. Imports no torch.

The scaling of the rotary embedding applies only to the layers without a window.
"""

from __future__ import annotations

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_rope
from runtime.models.decoder.spec import (
    DecoderSpec,
    DecoderTraits,
    read_layer_types,
    silu_decoder_fields,
)
from runtime.models.olmo2.spec import DEFAULTS, NORMS

TRAITS = DecoderTraits(biases="keyed", qk_norm=True, window="always", default_window=4096)
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_THETA = 500_000.0
# The last layer of each group of this size has no window.
_GROUP = 4


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    fields = silu_decoder_fields(config, generation, TRAITS)
    num_layers = fields["num_layers"]
    layers = read_layer_types(config, num_layers)
    if layers is None:
        layers = frozenset(i for i in range(num_layers) if (i + 1) % _GROUP)
    if layers and fields["sliding_window"] is None:
        raise config.error("sliding_window", "the number of keys that a query attends to")
    parameters = config.mapping("rope_parameters")
    if parameters and not all(isinstance(parameters.get(of), dict) for of in (_FULL, _WINDOWED)):
        raise config.error("rope_parameters", f"an object for {_FULL} and one for {_WINDOWED}")
    rope, context_len = read_rope(config, layer_type=_FULL, theta=_THETA)
    # `rope_scaling` of transformers 4 applies to the layers without a window only.
    unscaled = Keys(config.source, {**config.values, "rope_scaling": None})
    windowed_rope, _ = read_rope(unscaled, layer_type=_WINDOWED, theta=_THETA)
    fields["windowed_layers"] = layers
    return DecoderSpec(
        **fields,
        rope=rope,
        windowed_rope=windowed_rope,
        context_len=context_len,
        norms=NORMS,
        has_joint_qk_norm=True,
    )
