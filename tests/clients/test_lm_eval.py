"""`lm-eval`: `local-completions` with log-likelihoods and texts, `local-chat-completions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from tests.clients.scenarios import MODEL, need

lm_eval = need("lm_eval", "lm_eval")
pytest.importorskip("tenacity")  # of its extra `api`

CITIES = [" Paris", " Oslo", " Tokyo"]
DOCUMENTS = [
    {"question": f"The capital of {country} is", "choices": CITIES, "answer": index}
    for index, country in enumerate(("France", "Norway", "Japan"))
]
COMMON = {"dataset_path": "json", "test_split": "test", "target_delimiter": ""}
TASKS = {
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
    "rolled": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[answer]}}.",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "chatted": {
        "output_type": "generate_until",
        "doc_to_text": "What is {{question.replace('The', 'the').replace(' is', '')}}?",
        "doc_to_target": "{{question}}{{choices[answer]}}.",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def evaluated(tmp_path: Path) -> Any:
    from lm_eval.tasks import TaskManager

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    for name, task in TASKS.items():
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(
            json.dumps({"task": name, **COMMON, **files, **task})
        )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(model: str, tasks: list[str], arguments: dict[str, Any], **fields: Any) -> Any:
        settings = {"model": MODEL, "num_concurrent": 2, "max_retries": 1, **arguments}
        found = lm_eval.simple_evaluate(
            model=model, model_args=settings, tasks=tasks, task_manager=manager, **fields
        )
        return found["results"], found["samples"]

    return run


@pytest.mark.parametrize("tokenizer", ["remote", "huggingface"])
def test_completions(evaluated: Any, openai_url: str, tokenizer: str) -> None:
    arguments = {"base_url": f"{openai_url}/completions", "tokenizer_backend": tokenizer}
    if tokenizer == "huggingface":
        arguments["tokenizer"] = str(MODEL_PATH)
    results, samples = evaluated("local-completions", ["chosen", "written"], arguments)
    assert results["chosen"]["acc,none"] == 1.0
    assert results["written"]["exact_match,none"] == 1.0
    # A likelihood and whether it is the greedy choice, for each city.
    first = [response[0] for response in samples["chosen"][0]["resps"]]
    assert [is_greedy for _, is_greedy in first] == [True, False, False]


def test_likelihoods_are_those_of_transformers(evaluated: Any, openai_url: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = {"base_url": f"{openai_url}/completions", "tokenizer_backend": "remote"}
    _, samples = evaluated("local-completions", ["chosen"], arguments)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    for sample, document in zip(samples["chosen"], DOCUMENTS, strict=True):
        for (response,), city in zip(sample["resps"], CITIES, strict=True):
            (start,) = tokenizer([document["question"]], return_tensors="pt").input_ids
            (whole,) = tokenizer([document["question"] + city], return_tensors="pt").input_ids
            with torch.inference_mode():
                logprobs = model(whole[None]).logits[0].log_softmax(-1)
            places = range(len(start), len(whole))
            expected = sum(float(logprobs[place - 1, whole[place]]) for place in places)
            # The server computes in bfloat16.
            assert response[0] == pytest.approx(expected, rel=0.02, abs=0.05)


def test_rolling_likelihood(evaluated: Any, openai_url: str) -> None:
    arguments = {"base_url": f"{openai_url}/completions", "tokenizer_backend": "huggingface"}
    arguments["tokenizer"] = str(MODEL_PATH)
    results, _ = evaluated("local-completions", ["rolled"], arguments)
    # Known sentences are far below what bytes by chance would be.
    assert 1.0 < results["rolled"]["byte_perplexity,none"] < 2.5


def test_chat(evaluated: Any, openai_url: str) -> None:
    arguments = {"base_url": f"{openai_url}/chat/completions"}
    results, _ = evaluated(
        "local-chat-completions", ["chatted"], arguments, apply_chat_template=True
    )
    assert results["chatted"]["exact_match,none"] == 1.0
