"""What every API shares, over a fake engine; no HTTP, no process."""

from __future__ import annotations

from typing import Any

from runtime.client.status import EngineStatus
from runtime.config.options import ModelArgs, ServerConfig
from runtime.service.context import Lifecycle, ServiceContext
from tests.support.fake_engine import FakeEngine, fake_model_config
from tests.support.scripted_engine import ScriptedEngine


def fake_service(
    engine: FakeEngine | ScriptedEngine,
    *,
    config: ServerConfig | None = None,
    status: EngineStatus | None = None,
    **options: Any,
) -> ServiceContext:
    """The context around `engine`.

    Args:
        engine: answers the requests.
        config: the default serves "org/fake".
        status: without one there are no replicas to tell of.
        **options: other fields of `ServiceContext`.
    """
    return ServiceContext(
        config=config or ServerConfig(model=ModelArgs(served_model_name="org/fake")),
        model=fake_model_config(),
        tokenizer=engine.tokenizer,
        client=engine.client,
        status=status or EngineStatus([]),
        version="1.2.3",
        lifecycle=Lifecycle(warmed_up=True),
        **options,
    )
