"""The Triton attention back end inside the whole worker, interpreted on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.linear import LINEAR
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model
from tests.support.tiny_text_models import text_model, their_scores

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 9, 200, 31], list(range(3, 40)), [77] * 19]
NUM_NEW = 6
SCRIPT = """
import json, sys
from pathlib import Path
from kernels.prompt_attention import PROMPT_ATTENTION
from tests.support import interpreted_triton
from tests.support.engine import InProcessEngine

def run(folder, keys):
    engine = InProcessEngine(
        Path(folder), attention_backend="triton", chunked_prefill_size=11, max_running_requests=4
    )
    plain, told = [], []
    attention = engine.runner._attention
    make_plan = attention._plan

    def noted(key, batch, num_tokens):
        plan = make_plan(key, batch, num_tokens)
        queries = batch.qo_indptr.diff()[batch.num_decodes :]
        if len(queries):
            short = bool((batch.seq_lens[batch.num_decodes :] == queries).all())
            told.append((plan.short_prompts, short))
        return plan

    attention._plan = noted
    if keys == "plain":
        reference = PROMPT_ATTENTION.load("reference")
        attention._prompt = reference
        attend = attention._attend_prompts
        attention._attend_prompts = lambda *call: plain.append(call[2]) or attend(*call)
    for i, prompt in enumerate(json.loads(sys.argv[1]), 1):
        engine.add(i, prompt, int(sys.argv[2]), ignore_eos=True)
    engine.run()
    return [engine.tokens[i] for i in sorted(engine.tokens)], plain, told

print(json.dumps([run(*case) for case in json.loads(sys.argv[3])]))
"""


INVARIANT_SCRIPT = """
import sys
from pathlib import Path
from tests.support import interpreted_triton, ordered_triton
from tests.support.engine import InProcessEngine
from runtime.extras.logprobs.positions import LogprobSpec

prompts = [list(range(3, 30)), [77] * 9, [5, 9, 200]]

def run(one_by_one, **options):
    engine = InProcessEngine(
        Path(sys.argv[1]), attention_backend="triton", dtype="bfloat16", deterministic=True,
        **options,
    )
    assert engine.ready.attention_backend == "triton_invariant"
    for i, prompt in enumerate(prompts, 1):
        engine.add(i, prompt, 3, LogprobSpec(-1, i % 3, [7]), ignore_eos=True)
        if one_by_one:
            engine.run()
    engine.run()
    return [(engine.tokens[i], engine.outputs[i]) for i in range(1, 4)]

alone = run(True, disable_radix_cache=True)
assert run(False, chunked_prefill_size=11, overlap=True) == alone, "in chunks, in a batch"
"""

TEXTS_SCRIPT = """
import json, sys
from pathlib import Path
from tests.support import interpreted_triton
from tests.support.engine import InProcessEngine
from runtime.extras.pooled.parts import VECTOR

engine = InProcessEngine(Path(sys.argv[1]), attention_backend="triton")
for i, text in enumerate(json.loads(sys.argv[2]), 1):
    engine.add(i, text, 0, extras=[VECTOR])
engine.run()
blocks = [engine.blocks[i, "pooled"][0] for i in range(1, 5)]
print(json.dumps([[*memoryview(block.data).cast("f")] for block in blocks]))
"""

IMAGES_SCRIPT = """
import numpy as np
from kernels.prompt_attention import PROMPT_ATTENTION
from kernels.table import Entry
from runtime.extras.logprobs.positions import LogprobSpec
from tests.support import interpreted_triton, ordered_triton
from tests.support.engine import InProcessEngine
from tests.support.tiny_gemma3_vision import PROMPTS, tiny_gemma3_vision

# Causal: no step with an image may take it, though the first one's prompt is whole.
PROMPT_ATTENTION.entries["causal"] = Entry("kernels.prompt_attention.reference")
PROMPT_ATTENTION.preferred["cpu"] = ("causal",)

def run(**options):
    engine = InProcessEngine(tiny_gemma3_vision(), chunked_prefill_size=50, **options)
    for i, prompt in enumerate(PROMPTS[:2], 1):
        logprobs = LogprobSpec(0)
        engine.add(i, prompt.ids, 2, logprobs, ignore_eos=True, images=prompt.images)
    engine.run()
    positions = [*engine.inputs[1], *engine.inputs[2], *engine.outputs[1], *engine.outputs[2]]
    return np.array([each.logprob for each in positions if each.logprob is not None])

wanted = run(attention_backend="torch")
assert np.abs(run(attention_backend="triton") - wanted).max() < 1e-3
if run_invariant:
    found = run(attention_backend="triton", deterministic=True)
    assert np.abs(found - wanted).max() < 1e-3
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "HEADRACE_TEST_DEVICE": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(LINEAR.unavailable("cpu") is not None, reason="no C++ library")
@pytest.mark.parametrize("name", ["mistral_window", "gemma3"])
def test_invariant_attention_gives_the_same_bits_in_every_step(name: str) -> None:
    run(INVARIANT_SCRIPT, str(tiny_model(name)))


def test_an_images_tokens_see_one_another() -> None:
    run_invariant = LINEAR.unavailable("cpu") is None
    run(f"run_invariant = {run_invariant}\n{IMAGES_SCRIPT}")


def test_tokens_equal_those_of_the_default_back_end() -> None:
    """With `plain`, whole prompts read their keys where the projection left them."""
    models = {"qwen3": "paged", "mistral": "plain", "mistral_window": "plain", "gemma3": "plain"}
    cases = [(str(tiny_model(name)), keys) for name, keys in models.items()]
    output = run(SCRIPT, json.dumps(PROMPTS), str(NUM_NEW), json.dumps(cases))
    found = json.loads(output.splitlines()[-1])
    for (folder, keys), (tokens, plain, told) in zip(cases, found, strict=True):
        engine = InProcessEngine(Path(folder))
        for i, prompt in enumerate(PROMPTS, 1):
            engine.add(i, prompt, NUM_NEW, ignore_eos=True)
        engine.run()
        assert tokens == [engine.tokens[i] for i in (1, 2, 3)], folder
        # The first chunks alone and beside others; not the later ones, nor what a window cuts.
        assert bool(plain) == (keys == "plain")
        assert all(length <= 11 for lengths in plain for length in lengths)
        # Whether a step's prompts see nothing but themselves is told of some, and rightly.
        assert all(said == is_so for said, is_so in told)
        assert keys == "plain" or {said for said, _ in told} == {True, False}


def test_texts_behind_a_query_take_its_keys() -> None:
    folder, query = text_model("qwen3_scores"), list(range(3, 40))
    texts = [[9] * 5, [*query, 7], [*query, 8, 9], query]
    found = json.loads(run(TEXTS_SCRIPT, str(folder), json.dumps(texts)).splitlines()[-1])
    expected = their_scores(folder, texts)
    torch.testing.assert_close(torch.tensor(found), expected, atol=5e-5, rtol=5e-5)
