"""The client's accounting: exactly the requests in flight are counted."""

from dataclasses import replace

import pytest

from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationInput
from runtime.errors import InvalidRequest, Overloaded, TooLong
from runtime.ipc.messages import SchedulerInbound
from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from tests.support.pictures import PATCHES

LIMITS = EngineLimits(context_len=64, max_total_num_tokens=1024, vocab_size=32)
PAD = PATCHES.image_token_id
SEEING = replace(LIMITS, vision=PATCHES)
IMAGE = PreparedImage(bytes(16), (3, 28, 56), 2, bytes(3 * 28 * 56))


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
    return GenerationInput(
        [1, 2], RequestSpec(row=RowSpec(sampling=sampling), rid=rid, stream=True)
    )


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


def seen(ids: list[int], *starts: int, rid: str = "a") -> GenerationInput:
    images = [ImageInput(start, IMAGE) for start in starts]
    sampling = SamplingParams(max_new_tokens=4)
    return GenerationInput(ids, RequestSpec(row=RowSpec(sampling=sampling), rid=rid, images=images))


@pytest.mark.parametrize(
    ("ids", "starts"),
    [
        ([1, PAD, 2], ()),
        ([1, PAD, PAD, 2], ()),
        ([1, 2, 3], (1,)),
        ([1, PAD, 2], (1,)),
        ([1, PAD, PAD, PAD], (1,)),
        ([1, PAD, PAD, 2], (2,)),
        ([1, PAD, PAD, 2], (1, 1)),
    ],
)
def test_placeholders_and_images_belong_together(ids: list[int], starts: tuple[int, ...]) -> None:
    """Whatever route they have come on: the scheduler trusts it."""
    sent: list[SchedulerInbound] = []
    client = client_that_sends(sent)
    client.limits = SEEING
    with pytest.raises(InvalidRequest, match="placeholder tokens for images"):
        client.generate(seen(ids, *starts))
    assert not sent
    client.generate(seen([1, PAD, PAD, 2, PAD, PAD], 1, 4))
    assert len(sent) == 1


def test_a_text_model_sees_no_placeholder_and_takes_no_image() -> None:
    client = client_that_sends([])
    client.generate(seen([1, PAD])).close()
    with pytest.raises(InvalidRequest, match="a model that takes images"):
        client.generate(seen([1, PAD, PAD], 1))


def test_a_prompt_with_images_is_not_shortened() -> None:
    client = client_that_sends([])
    client.limits = replace(SEEING, allow_auto_truncate=True)
    with pytest.raises(TooLong):
        client.generate(seen([PAD, PAD, *[1] * 100], 0))
    client.generate(seen([1] * 100)).close()


def test_pixels_in_flight_are_bounded() -> None:
    client = client_that_sends([])
    client.limits = SEEING
    client.max_pixel_bytes = 2 * len(IMAGE.pixels)
    streams = [client.generate(seen([PAD, PAD], 0, rid=str(rid))) for rid in range(2)]
    with pytest.raises(Overloaded, match="images of other requests"):
        client.generate(seen([PAD, PAD], 0))
    # Texts are not held up.
    client.generate(seen([1, 2], rid="text"))
    streams[0].close()
    client.generate(seen([PAD, PAD], 0))
