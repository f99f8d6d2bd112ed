"""Checks that a model and options work with pipeline stages (`--pp-size`)."""

from __future__ import annotations

from runtime.checkpoint.model_spec import ModelSpec, PagedState
from runtime.config.options import ServerConfig
from runtime.errors import StartupError


def check_stages(config: ServerConfig, model: ModelSpec) -> None:
    """Refuse models and options that do not work if the layers are divided into pipeline stages.

    Raises:
        StartupError: the first such model property or option; the message is one line.
    """
    num_stages, num_layers = config.parallel.pp_size, len(model.layer_states)
    if num_stages == 1:
        return
    if num_stages > num_layers:
        raise StartupError(f"--pp-size {num_stages}: the model has {num_layers} layers.")
    refused = {
        "embedding and scoring models are not cut into stages": model.gives != "tokens",
        "models that take images are not cut into stages": model.vision is not None,
        "models that transformers computes are not cut into stages": model.impl != "headrace",
        "layers that keep another state than their own pages are not cut into stages": not all(
            isinstance(state, PagedState) for state in model.layer_states
        ),
        "omit --swa-full-tokens-ratio; layers of one stage have the same pages": (
            config.scheduling.swa_full_tokens_ratio is not None
        ),
        "experts are recorded only without stages; omit the options that record them": (
            config.logging.expert_distribution_recorder_mode is not None
            or config.scheduling.enable_return_routed_experts
        ),
    }
    for why, applies in refused.items():
        if applies:
            raise StartupError(f"--pp-size {num_stages}: {why}.")
