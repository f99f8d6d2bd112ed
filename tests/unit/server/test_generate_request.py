"""The rules for the shape of `/generate` bodies, without an engine."""

from array import array

import msgspec
import pytest

from runtime.errors import InvalidRequest
from runtime.extras.hidden_states.front import ALL, LAST
from runtime.service.generate_request import UNSUPPORTED_FIELDS, GenerateBody, plan_generate
from runtime.service.input_embeds import Features

VOCAB = 100


def plan(preferred=None, features=Features(), **body):
    decoded = msgspec.convert(body, GenerateBody)
    return plan_generate(decoded, preferred or {}, VOCAB, features=features)


def refused(**body) -> str:
    with pytest.raises(InvalidRequest) as caught:
        plan(**body)
    return caught.value.message


def test_single_or_list():
    assert plan(text="a").is_single
    assert not plan(text=["a"]).is_single
    assert not plan(text="a", sampling_params={"n": 3}).is_single
    assert plan(input_ids=[1, 2]).is_single
    assert not plan(input_ids=[[1, 2]]).is_single


def test_samples_are_prompt_major():
    made = plan(text=["a", "b"], sampling_params={"n": 2})
    assert [sample.prompt_index for sample in made.samples] == [0, 0, 1, 1]
    assert len({sample.spec.rid for sample in made.samples}) == 4
    assert all(sample.spec.sampling.n == 1 for sample in made.samples)


def test_text_wins_over_ids():
    assert plan(text="a", input_ids=[1]).prompts == ["a"]


def test_prompts_that_are_none():
    refused()
    refused(input_ids=[])
    refused(text=[])
    refused(input_ids=[1, [2]])


def test_max_new_tokens_default_null_and_named():
    (default,) = plan(text="a").samples
    assert default.spec.sampling.max_new_tokens == 128
    assert not default.spec.explicit_max_new_tokens
    (whole,) = plan(text="a", sampling_params={"max_new_tokens": None}).samples
    assert whole.spec.sampling.max_new_tokens is None
    (named,) = plan(text="a", sampling_params={"max_new_tokens": 128}).samples
    assert named.spec.explicit_max_new_tokens


def test_preferred_params_fill_absent_keys():
    preferred = {"temperature": 0.5, "max_new_tokens": 9}
    (sample,) = plan(preferred, text="a", sampling_params={"temperature": 0.2}).samples
    assert sample.spec.sampling.temperature == 0.2
    assert sample.spec.sampling.max_new_tokens == 9


def test_sampling_params_as_a_list():
    made = plan(text=["a", "b"], sampling_params=[{"top_k": 1}, {"top_k": 2}])
    assert [sample.spec.sampling.top_k for sample in made.samples] == [1, 2]
    assert "2 prompts" in refused(text=["a", "b"], sampling_params=[{}])
    assert "n must be the same" in refused(text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}])


def test_rids():
    assert plan(text="a", rid="r").samples[0].spec.rid == "r"
    made = plan(text=["a", "b"], rid="r")
    assert [sample.spec.rid for sample in made.samples] == ["r_0", "r_1"]
    assert [s.spec.rid for s in plan(text=["a", "b"], rid=["x", "y"]).samples] == ["x", "y"]
    assert plan(text="a", rid="r", sampling_params={"n": 2}).samples[0].spec.rid != "r"
    refused(text=["a", "b"], rid=["x"])
    refused(text=["a", "b"], rid=["x", "x"])
    refused(text="a", rid="")
    refused(text="a", rid="line\nbreak")
    refused(text="a", rid="x" * 1000)


def test_samples_of_one_seed_differ():
    made = plan(text="a", sampling_params={"n": 3, "sampling_seed": 5})
    assert [sample.spec.sampling.seed for sample in made.samples] == [5, 6, 7]


def test_namespaces_do_not_run_together():
    names = {
        plan(text="a", extra_key=key, cache_salt=salt).samples[0].spec.cache_namespace
        for key, salt in (("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), (None, None))
    }
    assert len(names) == 5
    assert plan(text="a", extra_key="").samples[0].spec.cache_namespace == ""
    refused(text="a", cache_salt="x" * 10_000)
    refused(text=["a", "b"], extra_key=["x"])


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_unsupported_fields_pass_when_neutral(name):
    for value in (None, False, [], {}, "", -1, [None, None]):
        plan(text="a", **{name: value})
    for value in (True, "x", [1], {"a": 1}, 7):
        assert name in refused(text="a", **{name: value})


def test_bounds_cost_nothing():
    assert "n must be" in refused(text="a", sampling_params={"n": 10**9})
    assert "4096" in refused(text=["a"] * 4096, sampling_params={"n": 2})
    refused(text="a", priority=2**70)
    # Whether there is such a replica is the client's to say.
    assert plan(text="a", data_parallel_rank=1).samples[0].spec.dp_rank == 1
    assert plan(text="a", data_parallel_rank=1, routed_dp_rank=0).samples[0].spec.dp_rank == 0
    assert plan(text="a", data_parallel_rank=-1).samples[0].spec.dp_rank is None


def test_what_routers_write_out_is_accepted():
    plan(
        text="a",
        model="unknown",
        stream=False,
        return_text_in_logprobs=False,
        log_metrics=True,
        return_hidden_states=False,
        background=False,
        no_logs=False,
        return_bytes=False,
        return_entropy=False,
    )


FULL = Features(hidden_size=2, offered=frozenset({"hidden_states"}), input_embeds=True)


def test_hidden_states_need_the_server_s_consent():
    assert "--enable-return-hidden-states" in refused(text="a", return_hidden_states=True)
    plan(text="a", return_hidden_states=[False])
    made = plan(features=FULL, text=["a", "b", "c"], return_hidden_states=[True, "last", False])
    assert [sample.spec.extras for sample in made.samples] == [[ALL], [LAST], []]
    (sample,) = plan(features=FULL, text="a", return_hidden_states="last").samples
    assert sample.spec.extras == [LAST]
    refused(features=FULL, text=["a", "b"], return_hidden_states=[True])


def test_routed_experts_need_the_server_s_consent():
    message = refused(text="a", return_routed_experts=True)
    assert "--enable-return-routed-experts" in message
    plan(text="a", return_routed_experts=False, routed_experts_start_len=3)
    full = Features(offered=frozenset({"routed_experts"}))
    made = plan(features=full, text=["a", "b"], return_routed_experts=True)
    assert [[each.prompt_start for each in sample.spec.extras] for sample in made.samples] == [
        [0],
        [0],
    ]
    (sample,) = plan(
        features=full, text="a", return_routed_experts=True, routed_experts_start_len=2
    ).samples
    assert [each.prompt_start for each in sample.spec.extras] == [2]
    refused(features=full, text="a", return_routed_experts=True, routed_experts_start_len=-1)


def test_embeddings_become_bytes():
    made = plan(features=FULL, input_embeds=[[1, 2.5], [3, 4]])
    assert made.is_single
    assert made.prompts == [[0, 0]]
    assert array("f", made.samples[0].spec.input_embeds).tolist() == [1, 2.5, 3, 4]
    made = plan(features=FULL, input_embeds=[[[1, 2]], [[3, 4], [5, 6]]])
    assert not made.is_single
    assert made.prompts == [[0], [0, 0]]


@pytest.mark.parametrize(
    "given",
    [
        [],
        [[]],
        [[1, 2, 3]],
        [[1, 2], [1]],
        [[1, 1e39]],
        [[1, float("nan")]],
        [[1, float("-inf")]],
        [[1, 2], [[1, 2]]],
        [[[1, 2]], [1, 2]],
        [[[1, 2]], []],
    ],
)
def test_embeddings_of_a_wrong_shape_are_refused(given):
    assert "input_embeds" in refused(features=FULL, input_embeds=given)


def test_embeddings_need_the_prefix_cache_off_and_no_other_prompt():
    assert "--disable-radix-cache" in refused(input_embeds=[[1, 2]])
    assert "all be given" in refused(features=FULL, text="a", input_ids=[1], input_embeds=[[1, 2]])
    assert plan(features=FULL, input_ids=[7], input_embeds=[[1, 2]]).prompts == [[7]]
    for more in (
        {"return_prompt_token_ids": True},
        {"return_logprob": True, "logprob_start_len": 0},
        {"session_params": {"id": "s"}},
    ):
        refused(features=FULL, input_embeds=[[1, 2]], **more)


def test_sessions_allow_a_prompt_without_tokens():
    assert plan(input_ids=[], session_params={"id": "s"}).prompts == [[]]
    assert plan(text="a", session_params={"id": "s", "rid": "r"}).session.rid == "r"
    assert "session_id" in refused(text="a", session_id="x", session_params={"id": "s"})
    plan(text="a", session_id="x", session_params={})
    assert plan(text="a", session_params={}).session is None
