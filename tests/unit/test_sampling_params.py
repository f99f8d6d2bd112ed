"""Every number in a sampling field is either refused or usable by the worker."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.executor.batch_rows import BatchRows
from runtime.requests.request_spec import RowSpec
from runtime.requests.sampling_params import (
    SamplingFields,
    SamplingParams,
    parse_logit_bias,
    resolve_sampling,
)
from runtime.step.step_plan import RowJoin

VOCAB_SIZE = 300
NUMBERS = {
    **dict.fromkeys(("top_k", "n", "stream_interval", "sampling_seed", "min_new_tokens"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "max_new_tokens"), int),
}
ANY_INT = st.one_of(
    st.integers(-2, 2), st.integers(), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, 2**64])
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={name: ANY_INT if kind is int else st.floats() for name, kind in NUMBERS.items()},
)


def resolve(**fields: object) -> SamplingParams:
    return resolve_sampling(SamplingFields(**fields), {"max_new_tokens": 128}, VOCAB_SIZE)


@given(FIELDS)
def test_every_number_is_refused_or_reaches_the_rows(fields: dict[str, float]) -> None:
    try:
        params = resolve(**fields)
    except InvalidRequest:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    rows = BatchRows(max_rows=1, max_pages=2, max_len=32, vocab_size=VOCAB_SIZE)
    no_output = np.zeros(0, dtype=np.int32)
    rows.apply([RowJoin(0, RowSpec(sampling=params), num_prompt=2, output_ids=no_output)], [])
    assert 1 <= rows.top_k[0] <= VOCAB_SIZE


@pytest.mark.parametrize("top_k", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 10**11, 2**70])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert resolve(top_k=top_k).top_k == VOCAB_SIZE


@pytest.mark.parametrize("key", ["x", "", "1.0", " 1", "1 ", "+1", "\uff11", "1" * 40])
def test_keys_of_a_bias_are_plain_digits(key: str) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        parse_logit_bias({key: 1.0})
