"""What is asked of experts at start, against a model that may have none."""

from __future__ import annotations

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.errors import StartupError


def check_experts(config: ServerConfig, model: ModelSpec) -> None:
    """Refuse what asks for experts where there are none.

    Raises:
        StartupError: the first option that does.
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
