"""The bound on the size of an answer, over all samples of the request."""

import pytest

from runtime.client.admission import EngineLimits
from runtime.client.answer_size import MAX_NUMBERS, MAX_PIXEL_BYTES, check_answer_size
from runtime.client.generation_stream import GenerationInput
from runtime.errors import InvalidRequest
from runtime.extras.hidden_states.front import ALL, LAST
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams

LIMITS = EngineLimits(2**17, 2**20, 150_000, hidden_size=4096)


def sample(num_prompt=10, max_new_tokens=None, *extras, input_embeds=b""):
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    spec = RequestSpec(row=RowSpec(sampling=sampling, extras=[*extras]), input_embeds=input_embeds)
    return GenerationInput([1] * num_prompt, spec)


def logprobs(**fields):
    return LogprobSpec(**fields).extra()


def refused(inputs):
    with pytest.raises(InvalidRequest) as raised:
        check_answer_size(inputs, LIMITS)
    return raised.value


def test_what_trainers_ask_for_passes():
    # 64k tokens with 20 log-probabilities each, eight times; a batch's own log-probabilities.
    check_answer_size([sample(10, 2**16, logprobs(top_num=20))] * 8, LIMITS)
    check_answer_size([sample(1000, 2**14, logprobs())] * 4096, LIMITS)
    check_answer_size([sample(2**13, 1, logprobs(start_len=0))] * 2000, LIMITS)
    check_answer_size([sample(1000, 7000, ALL)], LIMITS)
    check_answer_size([sample(1000, 7000, LAST)] * 4096, LIMITS)


def test_samples_are_counted_together():
    each = sample(10, 1990, logprobs(top_num=1000))
    check_answer_size([each], LIMITS)
    check_answer_size([each] * 8, LIMITS)
    error = refused([each] * 128)
    assert error.param == "top_logprobs_num"
    assert f"at most {MAX_NUMBERS} numbers" in error.message
    assert f"128 samples might come to {128 * 1990 * 2000}" in error.message


def test_the_whole_context_counts_where_nothing_else_is_said():
    each = sample(10, None, logprobs(top_num=200))
    assert str(200 * 2 * (2**17 - 10)) in refused([each]).message


def test_prompts_count_for_each_sample():
    each = sample(100_000, 1, logprobs(start_len=0))
    check_answer_size([each] * 128, LIMITS)
    assert refused([each] * 200).param == "top_logprobs_num"
    assert "100000" not in refused([sample(100_000, 1)] * 700).message
    assert "70000000" in refused([sample(100_000, 1)] * 700).message


def test_ids_that_are_asked_for_count_once():
    each = sample(10, 30_000, logprobs(token_ids=list(range(1000))))
    check_answer_size([each], LIMITS)
    refused([each] * 2)


def test_hidden_states_and_embeddings():
    assert refused([sample(1000, 8000, ALL)]).param == "return_hidden_states"
    embeds = bytes(4 * 4096 * 100)
    check_answer_size([sample(100, 1, input_embeds=embeds)] * 80, LIMITS)
    assert refused([sample(100, 1, input_embeds=embeds)] * 128).param == "input_embeds"


def test_images_count_for_each_sample():
    image = PreparedImage(b"", (3, 2048, 2048), 1, bytes(3 * 2048 * 2048))
    spec = RequestSpec(row=RowSpec(sampling=SamplingParams()), images=[ImageInput(0, image)])
    each = GenerationInput([1], spec)
    most = MAX_PIXEL_BYTES // len(image.pixels)
    check_answer_size([each] * most, LIMITS)
    assert "at most 512 MiB" in refused([each] * (most + 1)).message
