"""Adapters (LoRA) over HTTP: loaded, named on every wire, unloaded under load; no pickle."""

from __future__ import annotations

import base64
import json
import os
import pickle  # noqa: TID251  # what must be refused
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.trainer import adapter_body
from tests.support.adapters import ATTENTION, make_adapter, merged_model, write_adapter
from tests.support.native import slowed
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

MODEL = "llama"
PROMPT = [11, 47, 300, 8, 91, 222, 17, 5, 77, 400, 31]
NUM_TOKENS = 16
# 200 rounds: HEADRACE_FAULT_ROUNDS=40
ROUNDS = 5 * int(os.environ.get("HEADRACE_FAULT_ROUNDS", "2"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of different ranks, by name."""
    root = tmp_path_factory.mktemp("adapters")
    folder = tiny_model(MODEL)
    return {
        "small": make_adapter(root / "small", folder, 4, 1),
        "wide": make_adapter(root / "wide", folder, 16, 2, use_rslora=True, alpha=4.0),
        "query": make_adapter(root / "query", folder, 8, 3, ("q_proj", "down_proj")),
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """The greedy output of the merged weights in `transformers`, "" for the base."""
    found = {}
    for name, folder in {"": None, **folders}.items():
        model = merged_model(tiny_model(MODEL), folder)
        ids = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
        )
        found[name] = ids[0, len(PROMPT) :].tolist()
    assert len({tuple(ids) for ids in found.values()}) == len(found)
    return found


@pytest.fixture
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    server = running_server(
        MODEL,
        *("--num-threads", "1", "--random-seed", "1", "--served-model-name", "base"),
        *("--lora-paths", f"small={folders['small']}", "--max-lora-rank", "32"),
        *("--max-loras-per-batch", "2", "--max-loaded-loras", "3", "--enable-metrics"),
    )
    yield server
    for name in post(server, "/unload_lora_adapter", lora_name="?").json()["loaded_adapters"]:
        if name != "small":
            assert post(server, "/unload_lora_adapter", lora_name=name).status_code == 200


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body, timeout=60)


def load(server: ServerProcess, name: str, folder: Path, **more: Any) -> dict[str, Any]:
    answer = post(server, "/load_lora_adapter", lora_name=name, lora_path=str(folder), **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generate(server: ServerProcess, adapter: str = "", **more: Any) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    named = {"lora_path": adapter} if adapter else {}
    answer = post(server, "/generate", input_ids=PROMPT, sampling_params=sampling, **named, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def in_flight(server: ServerProcess, adapter: str) -> float:
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith("sglang:lora_requests_in_flight{") and f'"{adapter}"' in line:
            return float(line.rpartition(" ")[2])
    return 0


def refused(server: ServerProcess, path: str, **body: Any) -> str:
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    content = answer.json()
    if "success" in content:
        assert content["success"] is False
        return content["error_message"]
    return json.dumps(content)


def test_one_for_each_prompt_of_a_batch(server, folders, expected):
    for name in ("wide", "query"):
        assert name in load(server, name, folders[name])["loaded_adapters"]
    names = ["small", None, "wide", "query", "small", None]
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * len(names), "lora_path": names, "sampling_params": sampling}
    for _ in range(2):
        answers = post(server, "/generate", **body).json()
        assert [each["output_ids"] for each in answers] == [expected[name or ""] for name in names]
    assert "3 prompts" in refused(
        server, "/generate", text=["a", "b", "c"], lora_path=["small"], sampling_params=sampling
    )
    assert "no adapter 'other'" in refused(server, "/generate", text="a", lora_path="other")


def test_the_model_of_every_wire(server, folders):
    load(server, "wide", folders["wide"])
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert cards["wide"]["parent"] == "base"
    assert cards["wide"]["root"] == str(folders["wide"])
    assert cards["base"]["parent"] is None
    assert server.client.get("/v1/models/wide").json()["parent"] == "base"

    def completion(model: str, **more: Any) -> str:
        body = {"model": model, "prompt": "The wheel", "temperature": 0, "max_tokens": 8, **more}
        answer = post(server, "/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["text"]

    base, wide = completion("anything"), completion("base:wide")
    assert base != wide
    assert completion("base") == base
    assert completion("wide") == completion("other", lora_path="wide") == wide
    assert completion("wide", lora_path="small") == wide
    assert "no adapter" in refused(server, "/v1/completions", model="base:none", prompt="a")

    message = [{"role": "user", "content": "The wheel"}]

    def chat(model: str) -> str:
        body = {"model": model, "messages": message, "temperature": 0, "max_tokens": 8}
        answer = post(server, "/v1/chat/completions", **body).json()
        return answer["choices"][0]["message"]["content"]

    def messages(model: str) -> str:
        body = {"model": model, "messages": message, "temperature": 0, "max_tokens": 8}
        answer = post(server, "/v1/messages", **body).json()
        return "".join(block.get("text", "") for block in answer["content"])

    def response(model: str) -> str:
        body = {"model": model, "input": "The wheel", "temperature": 0, "max_output_tokens": 16}
        answer = post(server, "/v1/responses", **body).json()
        return answer["output"][0]["content"][0]["text"]

    def ollama(model: str) -> str:
        options = {"temperature": 0, "num_predict": 8}
        body = {"model": model, "messages": message, "options": options, "stream": False}
        return post(server, "/api/chat", **body).json()["message"]["content"]

    for ask in (chat, messages, response, ollama):
        assert ask("wide") == ask("base:wide")
        assert ask("wide") != ask("base")


def test_what_cannot_be_served_is_refused_by_name(server, folders, tmp_path):
    folder, good = tiny_model(MODEL), load_file(folders["small"] / "adapter_model.safetensors")

    def wrong(tensors: dict[str, torch.Tensor] | None = None, rank: int = 4, **config: Any) -> str:
        path = write_adapter(
            tmp_path / str(time.monotonic_ns()), tensors or good, rank, ATTENTION, **config
        )
        return refused(server, "/load_lora_adapter", lora_name="bad", lora_path=str(path))

    assert "DoRA" in wrong(use_dora=True)
    assert "modules_to_save (lm_head)" in wrong(modules_to_save=["lm_head"])
    assert "peft_type" in wrong(peft_type="IA3")
    assert "max-lora-rank" in refused(
        server,
        "/load_lora_adapter",
        lora_name="bad",
        lora_path=str(make_adapter(tmp_path / "rank", folder, 64, 1)),
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = good[f"{name}.lora_A.weight"], good[f"{name}.lora_B.weight"]
    assert "[4, 63], expected [4, 64]" in wrong({**good, f"{name}.lora_A.weight": a[:, 1:]})
    assert "only one of" in wrong({f"{name}.lora_A.weight": a})
    other = name.replace("layers.0", "layers.9")
    assert "layers.9" in wrong({f"{other}.lora_A.weight": a, f"{other}.lora_B.weight": b})
    head = "base_model.model.lm_head"
    assert "head" in wrong({f"{head}.lora_A.weight": a, f"{head}.lora_B.weight": b})
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text("{}")
    (pickled / "adapter_model.bin").write_bytes(pickle.dumps({}))
    for path, why in (
        (str(pickled), "adapter_model.bin"),
        ("/etc", "none of the folders"),
        ("../../etc", "folder"),
        ("owner/name", "folder"),
        ("", "folder"),
    ):
        assert why in refused(server, "/load_lora_adapter", lora_name="bad", lora_path=path)
    assert "already" in refused(
        server, "/load_lora_adapter", lora_name="small", lora_path=str(folders["small"])
    )
    assert "no adapter 'bad'" in refused(server, "/unload_lora_adapter", lora_name="bad")
    assert generate(server) == generate(server)


def test_tensors_of_a_trainer(server, folders, expected):
    """verl's calls: each step unloads the adapter and sends the next one's tensors."""
    for name in ("wide", "query", "wide"):
        config = json.loads((folders[name] / "adapter_config.json").read_text())
        tensors = load_file(folders[name] / "adapter_model.safetensors")
        body = adapter_body("policy", config, tensors)
        answer = post(server, "/load_lora_adapter_from_tensors", **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["loaded_adapters"]["policy"] == ""
        assert generate(server, "policy") == expected[name]
        assert "already" in refused(server, "/load_lora_adapter_from_tensors", **body)
        assert post(server, "/unload_lora_adapter", lora_name="policy").json()["success"]
        assert "no adapter" in refused(server, "/generate", text="a", lora_path="policy")
    data = base64.b64encode(pickle.dumps({"a": 1})).decode()
    body["serialized_tensors"] = data
    assert "pickled" in refused(server, "/load_lora_adapter_from_tensors", **body)
    assert "flattened" in refused(
        server, "/load_lora_adapter_from_tensors", **{**body, "load_format": "flattened_bucket"}
    )


def test_more_than_fit_in_host_memory(server, folders, expected):
    """With room for three, the one unused for longest leaves, and comes back when it is named."""
    for index in range(4):
        load(server, f"a{index}", folders["wide" if index % 2 else "query"])
    for _ in range(2):
        for index in range(4):
            want = expected["wide" if index % 2 else "query"]
            assert generate(server, f"a{index}") == want
    assert generate(server, "small") == expected["small"]
    text = server.client.get("/metrics").text
    assert "lora_requests_total{" in text
    assert 'lora_name="a1"' in text
    for index in range(4):
        assert post(server, "/unload_lora_adapter", lora_name=f"a{index}").status_code == 200
    assert 'lora_name="a1"' not in server.client.get("/metrics").text


def test_unloading_waits_for_requests(server, folders, expected):
    load(server, "wide", folders["wide"])
    sampling = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    body = {"input_ids": PROMPT, "lora_path": "wide", "sampling_params": sampling}
    with ThreadPoolExecutor() as pool, slowed(server, 0.02):
        running = [pool.submit(post, server, "/generate", **body) for _ in range(4)]
        until(lambda: in_flight(server, "wide") == len(running))
        unloaded = pool.submit(post, server, "/unload_lora_adapter", lora_name="wide")
        for each in running:
            assert each.result().json()["output_ids"][:NUM_TOKENS] == expected["wide"]
        assert unloaded.result().json()["success"]
    assert "no adapter" in refused(server, "/generate", text="a", lora_path="wide")


def churn(server, folders, expected, rounds: int) -> None:
    """Load, use and unload adapters while streams of others run, whose tokens never change."""
    stop = threading.Event()

    def stream(name: str) -> int:
        count = 0
        with httpx.Client(base_url=server.url, timeout=60) as client:
            sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling}
            if name:
                body["lora_path"] = name
            while not stop.is_set():
                ids = client.post("/generate", json=body).json()["output_ids"]
                assert ids == expected[name]
                count += 1
        return count

    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(stream, name) for name in ("", "small", "small")]
        try:
            for index in range(rounds):
                name = ("wide", "query")[index % 2]
                load(server, "coming", folders[name])
                assert generate(server, "coming") == expected[name]
                assert post(server, "/unload_lora_adapter", lora_name="coming").json()["success"]
        finally:
            stop.set()
        assert all(each.result() > 1 for each in streams)


def resident_kib(server: ServerProcess) -> int:
    """Memory of the server and its children that is not shared."""
    total = 0
    for pid in (server.process.pid, *server.child_pids()):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1])
    return total


def test_loading_and_unloading_under_load(server, folders, expected):
    churn(server, folders, expected, 5)
    before = resident_kib(server)
    churn(server, folders, expected, ROUNDS)
    # An adapter of this model is 100 KiB, so what was kept of 200 would be 20 MiB.
    assert resident_kib(server) < before + 8 * 1024


@pytest.mark.parametrize(("model", "ranks"), [("qwen2_moe", "--tp-size"), ("llama", "--pp-size")])
def test_two_ranks(model, ranks, tmp_path):
    """Each rank has its part of the adapters; of a mixture, those of attention."""
    folders = [make_adapter(tmp_path / str(r), tiny_model(model), r, r, ATTENTION) for r in (4, 8)]
    with ServerProcess(
        *("--model-path", str(tiny_model(model)), ranks, "2", "--num-threads", "1"),
        *("--lora-paths", *(f"{folder.name}={folder}" for folder in folders)),
    ).wait_ready() as served:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": [PROMPT] * 3, "lora_path": ["4", None, "8"]}
        answers = post(served, "/generate", **body, sampling_params=sampling).json()
        for answer, folder in zip(answers, (folders[0], None, folders[1]), strict=True):
            merged = merged_model(tiny_model(model), folder)
            ids = merged.generate(
                torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=-1
            )
            assert answer["output_ids"] == ids[0, len(PROMPT) :].tolist()
        # One rank refuses it: the first layer is in one stage.
        wrong = make_adapter(tmp_path / "wrong", tiny_model(model), 4, 9, ("q_proj",))
        tensors = load_file(wrong / "adapter_model.safetensors")
        name = min(name for name in tensors if ".layers.0." in name)
        tensors[name][0, 0] = torch.nan
        save_file(tensors, wrong / "adapter_model.safetensors")
        for _ in range(2):
            refused = post(served, "/load_lora_adapter", lora_name="w", lora_path=str(wrong))
            assert refused.status_code == 400
            assert "NaN or infinite" in refused.text
        again = post(served, "/generate", **body, sampling_params=sampling).json()
        assert [each["output_ids"] for each in again] == [each["output_ids"] for each in answers]
