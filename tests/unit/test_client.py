"""The client's books: what is in flight, and nothing else, counts as in flight."""

import pytest

from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationInput
from runtime.errors import InvalidRequest
from runtime.ipc.messages import SchedulerInbound
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import SamplingParams

LIMITS = EngineLimits(context_len=64, max_total_num_tokens=1024, vocab_size=32)


def client_that_sends(sent: list[SchedulerInbound], fault: Exception | None = None) -> EngineClient:
    def send(message: SchedulerInbound) -> None:
        if fault is not None:
            raise fault
        sent.append(message)

    client = EngineClient(LIMITS)
    client.links[0].connect(send)
    client.ready = True
    return client


def request(rid: str = "a") -> GenerationInput:
    sampling = SamplingParams(max_new_tokens=4)
    return GenerationInput([1, 2], RequestSpec(sampling=sampling, rid=rid, stream=True))


def test_what_cannot_be_sent_is_not_in_flight() -> None:
    client = client_that_sends([], OverflowError("too large for a message"))
    for _ in range(2):
        # The same name twice: the first attempt must not hold it.
        with pytest.raises(OverflowError):
            client.generate(request())
    assert client.num_in_flight == 0


def test_a_name_is_taken_until_its_stream_closes() -> None:
    client = client_that_sends([])
    stream = client.generate(request())
    assert client.num_in_flight == 1
    with pytest.raises(InvalidRequest, match="already in flight"):
        client.generate(request())
    stream.close()
    assert client.num_in_flight == 0
    client.generate(request()).close()


@pytest.mark.parametrize(("rid", "matched"), [("b", 2), ("b_1", 1), ("", 0), ("b_", 0), ("x", 0)])
def test_an_abort_matches_a_name_or_a_whole_batch(rid: str, matched: int) -> None:
    client = client_that_sends([])
    for name in ("a", "b_0", "b_1", "bb_0"):
        client.generate(request(name))
    assert client.abort(rid) == matched
