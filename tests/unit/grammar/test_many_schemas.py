"""Three thousand different schemas leave no more memory behind than the caches' bound."""

from __future__ import annotations

import gc
import json
import resource
import time
from pathlib import Path

import pytest

from headrace.demo import MODEL_PATH
from runtime.grammar.cache import ByteCache, loaded_size
from runtime.grammar.grammar_backend import GRAMMAR_BACKENDS
from runtime.ipc.messages import GenerateRequest
from runtime.models.registry import read_model_spec
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import GrammarSpec, SamplingParams
from runtime.scheduler.grammars import Grammars
from runtime.scheduler.request import Request
from tests.support.grammar_backends import BACKENDS

CACHE_BYTES = 4 * 2**20
NUM_SCHEMAS = 3_000


def rss_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_memory_is_bounded(name: str) -> None:
    folder = Path(MODEL_PATH)
    config = read_model_spec(folder)
    eos = list(config.eos_token_ids)
    backend = GRAMMAR_BACKENDS.load(name)(folder, config.vocab_size, eos)
    grammars = Grammars(lambda: backend, config.vocab_size, eos, CACHE_BYTES)
    # The front's twin decides what is sent: it must say the same as the scheduler's cache.
    twin: ByteCache[bool] = ByteCache(CACHE_BYTES)
    sampling = SamplingParams(max_new_tokens=4)

    def ask(number: int) -> None:
        spec = GrammarSpec("json_schema", json.dumps({"enum": [f"name{number}", number]}))
        key, payload = str(number).encode(), backend.compile(spec)
        assert twin.get(key) is None
        twin.put(key, True, loaded_size(payload))
        request = Request(
            GenerateRequest(number, bytes(4), RequestSpec(row=RowSpec(sampling=sampling)))
        )
        grammars.take(request, key, payload)
        while not (ready := list(grammars.ready(lambda *_: pytest.fail("refused")))):
            time.sleep(0)
        assert ready == [request]

    for number in range(NUM_SCHEMAS // 5):
        ask(number)
    before = rss_bytes()
    for number in range(NUM_SCHEMAS // 5, NUM_SCHEMAS):
        ask(number)
    assert grammars.cached_bytes <= CACHE_BYTES
    assert len(twin) < NUM_SCHEMAS // 5
    assert twin.size_bytes == grammars.cached_bytes
    # The cache was full before; what is left to grow is the allocator's. Less than 2 kB a schema.
    assert rss_bytes() - before < 4 * 2**20
    grammars.clear()
    assert grammars.cached_bytes == 0
