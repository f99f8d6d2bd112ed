"""Records of expert use against hooks on the same model in `transformers`."""

import base64
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as sgl
from tests.support.native import run_example
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

TEXTS = ["The miller opens the gate.", "one two three four five six seven eight " * 2, "a"]
NUM_NEW = 12


def their_choices(tokens: list[int]) -> dict[int, torch.Tensor]:
    """By layer, the experts of each token as `transformers` chooses, `[num_tokens, num_chosen]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2_moe"), dtype=torch.float32)
    found: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(
                lambda _, __, output, index=index: found.__setitem__(index, output[2])
            )
    with torch.inference_mode():
        model.eval()(torch.tensor([tokens]))
    return found


def counts_of(sequences: list[list[int]]) -> torch.Tensor:
    counts = torch.zeros(3, 6, dtype=torch.int64)
    for tokens in sequences:
        for layer, chosen in their_choices(tokens).items():
            counts[layer] += torch.bincount(chosen.flatten(), minlength=6)
    return counts


def generate(server: ServerProcess) -> list[list[int]]:
    """Tokens that were computed: prompts, and all of the answers but their last."""
    computed = []
    for text in TEXTS:
        ids = server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        answer = server.client.post("/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        computed.append(ids + answer.json()["output_ids"][:-1])
    return computed


def control(server: ServerProcess, action: str) -> str:
    answer = server.client.post(f"/{action}_expert_distribution_record")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return answer.text


def written(folder: Path) -> list[Path]:
    """By rank, then by time: each rank writes its file when it comes to it."""
    files = folder.glob("expert_distribution_recorder_*.pt")
    return sorted(files, key=lambda file: (file.stem.rpartition("_")[2], file.stem))


def read(file: Path) -> dict[str, Any]:
    # As users of the reference do; it runs no code of the file's.
    found: dict[str, Any] = torch.load(file, weights_only=True)  # noqa: TID251
    return found


def assert_routed(answer: dict[str, Any], prompt: list[int], start: int = 0) -> None:
    """What a request was told of its experts against `transformers`, in any order of choice."""
    data = base64.b64decode(answer["meta_info"]["routed_experts"])
    found = torch.frombuffer(bytearray(data), dtype=torch.int32).view(-1, 2, 2)
    choices = their_choices([*prompt, *answer["output_ids"]][:-1])
    expected = torch.stack([choices[layer] for layer in (1, 2)], dim=1)[start:]
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values.int())


OPTIONS = ("--disable-radix-cache", "--chunked-prefill-size", "16", "--num-threads", "1")


@pytest.mark.parametrize("ranks", [(), ("--tp-size", "2", "--ep-size", "2")])
def test_counts_are_those_of_a_hook(tmp_path, monkeypatch, ranks) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "new"))
    folder = tmp_path / "new"
    path = str(tiny_model("qwen2_moe"))
    options = ("--expert-distribution-recorder-mode", "stat", *ranks, *OPTIONS)
    with ServerProcess("--model-path", path, *options) as server:
        server.wait_ready()
        generate(server)
        control(server, "start")
        computed = generate(server)
        control(server, "stop")
        generate(server)
        assert "Written" in control(server, "dump")
        (file,) = written(folder)
        found = read(file)
        assert found["rank"] == 0
        assert found["logical_count"].shape == (1000, 3, 6)
        expected = counts_of(computed)
        assert torch.equal(found["logical_count"].sum(dim=0), expected)
        # The first layer is dense.
        assert not expected[0].any()
        assert expected[1:].sum() > 0
        lines = file.with_suffix(".csv").read_text().splitlines()
        assert lines[0] == "layer_id,expert_id,count"
        assert f"1,3,{int(expected[1, 3])}" in lines
        control(server, "dump")
        again = [read(each) for each in written(folder) if each != file]
        assert not again[0]["logical_count"].any()
        before = written(folder)
        printed = run_example("expert_distribution.py", server)
        assert printed.count("<Response [200]>") == 3
        (last,) = set(written(folder)) - set(before)
        assert read(last)["logical_count"].sum() > 0


@pytest.mark.parametrize("ranks", [(), ("--tp-size", "2")])
def test_passes_and_tokens(tmp_path, monkeypatch, ranks) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    path = str(tiny_model("qwen2_moe"))
    options = ("--expert-distribution-recorder-mode", "per_token", *ranks, *OPTIONS)
    with ServerProcess("--model-path", path, *options) as server:
        server.wait_ready()
        control(server, "start")
        computed = generate(server)
        control(server, "dump")
    files = written(tmp_path)
    assert [file.stem[-2:] for file in files] == ["_0", "_1"][: len(ranks) or 1]
    for file in files:
        check_tokens(read(file), computed)


def check_tokens(found: dict[str, Any], computed: list[list[int]]) -> None:
    records = found["records"]
    total = sum(record["global_physical_count"] for record in records)
    assert torch.equal(total, counts_of(computed))
    chosen = torch.cat([record["topk_ids_of_layer"][1] for record in records])
    expected = torch.cat([their_choices(tokens)[1] for tokens in computed])
    assert torch.equal(chosen.sort(dim=1).values, expected.sort(dim=1).values)
    ids = [token for record in records for token in record["input_ids"]]
    assert ids == [token for tokens in computed for token in tokens]
    assert [record["forward_pass_id"] for record in records] == list(range(len(records)))
    assert records[0]["forward_mode"] == "EXTEND"
    assert records[-1]["forward_mode"] == "DECODE"
    assert found["last_physical_to_logical_map"].tolist() == [list(range(6))] * 3


def test_requests_are_told_their_experts() -> None:
    path = str(tiny_model("qwen2_moe"))
    options = ("--enable-return-routed-experts", "--tp-size", "2", *OPTIONS)
    with ServerProcess("--model-path", path, *options) as server:
        server.wait_ready()
        prompt = list(range(5, 40))
        sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
        assert_routed(server.client.post("/generate", json=body).json(), prompt)
        for start in (7, len(prompt)):
            answer = server.client.post(
                "/generate", json=body | {"routed_experts_start_len": start}
            )
            assert_routed(answer.json(), prompt, start)
        behind = body | {"routed_experts_start_len": len(prompt) + 1}
        answer = server.client.post("/generate", json=behind)
        assert answer.status_code == 400
        assert "larger than the prompt (35 tokens)" in answer.text
        for wrong in ({"routed_experts_start_len": -1}, {"return_routed_experts": "yes"}):
            answer = server.client.post("/generate", json=body | wrong)
            assert answer.status_code == 400
            assert next(iter(wrong)) in answer.text
        plain = body | {"return_routed_experts": False}
        assert "routed_experts" not in server.client.post("/generate", json=plain).text


def test_without_the_mode_it_is_refused() -> None:
    with ServerProcess("--model-path", str(tiny_model("qwen2_moe"))) as server:
        server.wait_ready()
        answer = server.client.post("/start_expert_distribution_record")
        assert answer.status_code == 400
        assert "--expert-distribution-recorder-mode" in answer.text


def test_the_engine_says_that_a_dense_model_has_none() -> None:
    with pytest.raises(RuntimeError, match="has no experts"):
        sgl.Engine(model_path=str(tiny_model("qwen3")), expert_distribution_recorder_mode="stat")
    with pytest.raises(RuntimeError, match=r"enable_return_routed_experts: .* has no experts"):
        sgl.Engine(model_path=str(tiny_model("qwen3")), enable_return_routed_experts=True)


def test_the_engine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    with sgl.Engine(
        model_path=str(tiny_model("qwen2_moe")),
        expert_distribution_recorder_mode="per_pass",
        enable_return_routed_experts=True,
    ) as engine:
        engine.start_expert_distribution_record()
        prompt, sampling = list(range(5, 30)), {"max_new_tokens": 4, "temperature": 0}
        answer = engine.generate(
            input_ids=prompt, sampling_params=sampling, return_routed_experts=True
        )
        assert_routed(answer, prompt)
        engine.stop_expert_distribution_record()
        engine.dump_expert_distribution_record()
    (file,) = written(tmp_path)
    assert read(file)["records"]
