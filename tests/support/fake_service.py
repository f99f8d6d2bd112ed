"""The service context that all APIs share, over a fake engine, without HTTP and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from runtime.config.options import ModelArgs, ServerConfig
from runtime.processes.status import EngineStatus
from runtime.service.changes import Changes
from runtime.service.context import Lifecycle, ServiceContext
from runtime.weights.adapter_control import AdapterControl
from runtime.weights.weight_control import WeightControl
from tests.support.fake_engine import FakeEngine, fake_model_config
from tests.support.scripted_engine import ScriptedEngine


def fake_service(
    engine: FakeEngine | ScriptedEngine,
    *,
    config: ServerConfig | None = None,
    status: EngineStatus | None = None,
    **options: Any,
) -> ServiceContext:
    """Return a service context around `engine`.

    Args:
        engine: answers the requests.
        config: the options; by default the model is named "org/fake".
        status: by default a status without replicas.
        **options: other fields of `ServiceContext`.
    """
    config = config or ServerConfig(model=ModelArgs(served_model_name="org/fake"))
    return ServiceContext(
        config=config,
        model=fake_model_config(),
        tokenizer=engine.tokenizer,
        client=engine.client,
        status=status or EngineStatus([]),
        version="1.2.3",
        weights=cast("WeightControl", None),
        adapters=AdapterControl(engine.client, fake_model_config(), None, Path("unused")),
        changes=Changes(config.model),
        lifecycle=Lifecycle(warmed_up=True),
        **options,
    )
