"""What cannot go with a prefix cache in host memory is one line at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.config.options import ServerConfig
from runtime.config.parallel_options import ParallelArgs
from runtime.config.scheduling_options import SchedulingArgs
from runtime.errors import StartupError
from runtime.launch.tier_options import host_pool_ratio, page_files
from runtime.models.registry import read_model_spec
from tests.support.fake_checkpoint import write_config
from tests.support.fake_engine import fake_model_config

FILES: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"path": "pages", "max_size_gb": 2.5}',
}


@pytest.mark.parametrize(
    ("scheduling", "config", "why"),
    [
        ({"hicache_ratio": 0.0}, {}, "--hicache-ratio must be a number above 0, got 0"),
        ({"hicache_ratio": float("inf")}, {}, "--hicache-ratio must be a number above 0, got inf"),
        ({"disable_radix_cache": True}, {}, "omit --disable-radix-cache"),
        ({"swa_full_tokens_ratio": 0.5}, {}, "omit --swa-full-tokens-ratio"),
        ({}, {"parallel": ParallelArgs(pp_size=2)}, "omit --pp-size"),
    ],
)
def test_options_that_do_not_go_together(
    scheduling: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    model = fake_model_config()
    args = SchedulingArgs(enable_hierarchical_cache=True, **scheduling)
    with pytest.raises(StartupError, match=why):
        host_pool_ratio(ServerConfig(scheduling=args, **config), model)


def test_models_without_pages_alone(tmp_path: Path) -> None:
    on = ServerConfig(scheduling=SchedulingArgs(enable_hierarchical_cache=True))
    model = fake_model_config()
    hybrid = write_config(tmp_path, architectures=["Qwen3NextForCausalLM"], num_hidden_layers=4)
    refused = replace(model, gives="vectors")
    with pytest.raises(StartupError, match="embedding and scoring models"):
        host_pool_ratio(on, refused)
    assert host_pool_ratio(ServerConfig(), refused) == 0
    assert host_pool_ratio(on, model) == host_pool_ratio(on, read_model_spec(hybrid)) == 2.0
    files = ServerConfig(scheduling=SchedulingArgs(**FILES))
    with pytest.raises(StartupError, match="states are not kept in files"):
        page_files(files, read_model_spec(hybrid))


@pytest.mark.parametrize(
    ("scheduling", "parallel", "why"),
    [
        ({"enable_hierarchical_cache": False}, {}, "needs --enable-hierarchical-cache"),
        ({}, {"tp_size": 2}, "omit --tp-size"),
        ({"hicache_storage_backend_extra_config": None}, {}, "needs a folder"),
        ({"hicache_storage_backend_extra_config": "{"}, {}, "extra-config: Input data was"),
        ({"hicache_storage_backend_extra_config": "{}"}, {}, "missing required field `path`"),
        ({"hicache_storage_backend_extra_config": '{"path": ""}'}, {}, "must name a folder"),
        (
            {"hicache_storage_backend_extra_config": '{"path": "x", "max_size_gb": 0}'},
            {},
            "max_size_gb must be above 0",
        ),
        (
            {"hicache_storage_backend_extra_config": '{"path": "x", "gib": 1}'},
            {},
            "unknown field `gib`",
        ),
    ],
)
def test_files_that_cannot_be(scheduling: Any, parallel: Any, why: str) -> None:
    args = SchedulingArgs(**(FILES | scheduling))
    with pytest.raises(StartupError, match=why):
        page_files(
            ServerConfig(scheduling=args, parallel=ParallelArgs(**parallel)), fake_model_config()
        )


def test_the_path_of_files_is_absolute() -> None:
    model = fake_model_config()
    assert page_files(ServerConfig(), model) is None
    found = page_files(ServerConfig(scheduling=SchedulingArgs(**FILES)), model)
    assert found is not None
    assert found.path == str(Path("pages").absolute())
    assert found.max_size_gb == 2.5
