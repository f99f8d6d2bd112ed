from collections.abc import Iterator

import pytest

import headrace as sgl
from tests.support.lang_server import LangServer


@pytest.fixture
def stub() -> Iterator[LangServer]:
    with LangServer() as server:
        yield server


@pytest.fixture
def endpoint(stub: LangServer) -> Iterator[sgl.RuntimeEndpoint]:
    endpoint = sgl.RuntimeEndpoint(stub.url)
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)
    endpoint.shutdown()
