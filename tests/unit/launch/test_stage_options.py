"""What cannot go with layers in stages is one line at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.config.options import LoggingArgs, ServerConfig
from runtime.config.parallel_options import ParallelArgs
from runtime.config.scheduling_options import SchedulingArgs
from runtime.errors import StartupError
from runtime.launch.stage_options import check_stages
from runtime.models.layers.stage import Stage
from runtime.models.registry import read_model_spec
from tests.support.fake_checkpoint import write_config
from tests.support.fake_engine import fake_model_config

TWO = ParallelArgs(pp_size=2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parallel": ParallelArgs(pp_size=99)}, "--pp-size 99: the model has"),
        ({"scheduling": SchedulingArgs(swa_full_tokens_ratio=0.5)}, "omit --swa-full-tokens"),
        ({"scheduling": SchedulingArgs(enable_return_routed_experts=True)}, "experts are recorded"),
        ({"logging": LoggingArgs(expert_distribution_recorder_mode="stat")}, "experts are rec"),
    ],
)
def test_options_that_need_all_layers(options: dict[str, Any], why: str) -> None:
    model = fake_model_config(num_layers=2)
    check_stages(ServerConfig(parallel=TWO), model)
    with pytest.raises(StartupError, match=why):
        check_stages(ServerConfig(**{"parallel": TWO, **options}), model)


def test_models_that_are_not_cut(tmp_path: Path) -> None:
    model = fake_model_config(num_layers=2)
    hybrid = write_config(tmp_path, architectures=["Qwen3NextForCausalLM"], num_hidden_layers=4)
    for refused, why in (
        (replace(model, gives="vectors"), "embedding and scoring models"),
        (replace(model, impl="transformers"), "models that transformers computes"),
        (read_model_spec(hybrid), "another state than their own pages"),
    ):
        with pytest.raises(StartupError, match=why):
            check_stages(ServerConfig(parallel=TWO), refused)
        check_stages(ServerConfig(), refused)


@pytest.mark.parametrize(("num_layers", "count"), [(7, 2), (3, 3), (28, 4), (5, 4)])
def test_stages_have_each_layer_once(num_layers: int, count: int) -> None:
    stages = [Stage(index, count).layers(num_layers) for index in range(count)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
