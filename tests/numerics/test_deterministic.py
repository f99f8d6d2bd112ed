"""`--enable-deterministic-inference`: tokens and log-probabilities to the last bit."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kernels.linear import LINEAR
from kernels.paged_attention import cpu as cpu_attention
from kernels.sampling import gather_logprobs, sample
from runtime.errors import StartupError
from runtime.models.decoder.experts_spec import RouterSpec
from runtime.models.layers.router import choose
from tests.support.deterministic import Result, Workload, without_prompts
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

if LINEAR.unavailable("cpu") is not None:
    pytest.skip("no C++ library", allow_module_level=True)

WORK = Workload()


def make_engine(name: str, dtype: str, **options: Any) -> InProcessEngine:
    options = {"deterministic": True, **options}
    return InProcessEngine(tiny_model(name), dtype=dtype, **options)


@cache
def alone(name: str, dtype: str) -> list[Result]:
    found = WORK.one_by_one(make_engine(name, dtype, disable_radix_cache=True))
    for i, (tokens, outputs, inputs) in enumerate(found):
        assert len(tokens) == len(outputs) == WORK.num_new
        assert len(inputs) == len(WORK.prompt(i)) - 1
    return found


WAYS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 5": {"chunked_prefill_size": 5},
    "chunks of 37, overlap": {"chunked_prefill_size": 37, "overlap": True},
    "retracted": {"max_total_tokens": 480, "page_size": 8},
    "retracted, overlap, chunks of 11": {
        "max_total_tokens": 208,
        "overlap": True,
        "chunked_prefill_size": 11,
    },
    "two threads, pages of 1": {"num_threads": 2, "page_size": 1},
    "three rows": {"max_running_requests": 3},
}
MODELS = ["qwen3", "llama_biased", "mistral_window", "qwen2", "gemma3", "qwen3_next"]


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        *(("bfloat16", way) for way in WAYS),
        # The kernels of another dtype are scheduled alike: the ways that mix rows the most.
        ("float32", "one batch"),
        ("float32", "retracted, overlap, chunks of 11"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_how_it_is_scheduled_does_not_show(name: str, dtype: str, way: str) -> None:
    engine = make_engine(name, dtype, **WAYS[way])
    assert WORK.together(engine) == alone(name, dtype)
    # Pages behind a window are let go first, and here they suffice (`test_windows`).
    if "retracted" in way and name != "mistral_window":
        assert engine.shared["num_retractions_total"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_cached_prefix_does_not_show(name: str, dtype: str) -> None:
    expected = without_prompts(alone(name, dtype))
    engine = make_engine(name, dtype)
    for first_id in (1, 101):
        assert WORK.together(engine, first_id, of_prompt=False) == expected
    assert engine.cached[101 + 15] >= WORK.shared
    # A greedy answer's first half, as part of the prompt, is cached as it was decoded.
    for i in (0, 8):
        tokens, outputs, _ = expected[i]
        spec = WORK.spec(i, of_prompt=False)
        engine.add(201 + i, WORK.prompt(i) + tokens[:10], 10, spec, ignore_eos=True)
        engine.run()
        assert engine.cached[201 + i] > 0
        assert (engine.tokens[201 + i], engine.outputs[201 + i]) == (tokens[10:], outputs[10:])


def test_plain_torch_does_not_pass_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a difference where there is one."""
    monkeypatch.setitem(LINEAR.preferred, "cpu", ("reference",))
    options = {"deterministic": False, "attention_backend": "torch"}
    one = WORK.one_by_one(make_engine("qwen3", "float32", disable_radix_cache=True, **options))
    many = WORK.together(make_engine("qwen3", "float32", **options))
    assert one != many


def test_what_has_no_invariant_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"float16, has no 'cpu' product; use bfloat16"):
        make_engine("qwen3", "float16", device="cpu")
    with pytest.raises(StartupError, match="--attention-backend torch is not batch-invariant"):
        make_engine("qwen3", "float32", device="cpu", attention_backend="torch")
    with monkeypatch.context() as patch:
        patch.setattr(cpu_attention, "_MAX_HEAD_DIM", 16)
        with pytest.raises(StartupError, match="heads of 32 in float32 have no batch-invariant"):
            make_engine("qwen3", "float32", device="cpu")
    monkeypatch.setattr(LINEAR, "unavailable", lambda name: "there is no compiler")
    with pytest.raises(StartupError, match="nothing batch-invariant runs on cpu: cpu: there is no"):
        make_engine("qwen3", "float32", device="cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_sampling_does_not_feel_the_batch(threads: int) -> None:
    """Rows of a large vocabulary, where torch cuts its loops among threads."""
    from tests.kernels.triton_sampling_cases import SETTINGS, make_rows

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = make_rows(SETTINGS)
        logits = torch.randn(len(SETTINGS), 50_003)
        ids = torch.randint(0, 50_003, (len(SETTINGS), 4))
        tokens, found = sample(logits, rows), gather_logprobs(logits, ids, 6)
        for i in range(len(SETTINGS)):
            one = slice(i, i + 1)
            columns = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
            alone = replace(rows, **{name: getattr(rows, name)[one] for name in columns})
            assert torch.equal(sample(logits[one], alone), tokens[one])
            for top_k in (2, 6):
                values = gather_logprobs(logits[one], ids[one, :2], top_k)
                assert torch.equal(values[0], found[0][one, :2])
                assert torch.equal(values[1], found[1][one, :top_k])
    finally:
        torch.set_num_threads(before)


def test_sigmoids_of_experts_do_not_feel_the_batch() -> None:
    """With a number of experts at which torch's sigmoid differs by the place of a row."""
    spec = RouterSpec(score="sigmoid", sums_to_one=True, num_groups=2, group_score="best_two")
    logits, correction = torch.randn(37, 26), torch.randn(26)
    ids, weights = choose(logits, 4, spec, correction)
    for i in range(len(logits)):
        one = choose(logits[i : i + 1].clone(), 4, spec, correction)
        assert torch.equal(one[0], ids[i : i + 1])
        assert torch.equal(one[1], weights[i : i + 1])
