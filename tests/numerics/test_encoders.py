"""Encoders against `transformers`: vectors of texts, alone and among neighbours."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.linear import LINEAR
from runtime.checkpoint.sentence_transformers import Pooling
from runtime.errors import StartupError
from runtime.extras.pooled.parts import VECTOR, behind_prompt, of_pair
from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import read_model_spec
from runtime.weights.fill import load_weights
from runtime.weights.load_model import build_model
from tests.support.engine import DEVICE, InProcessEngine
from tests.support.tiny_families import tiny_family
from tests.support.tiny_models import TINY_BERTS, edit_json, tiny_bert
from tests.support.tiny_text_models import (
    SCORES,
    TEXT_MODELS,
    VECTORS,
    add_dense,
    text_model,
    their_hidden,
    their_scores,
    their_vectors,
)

TEXTS = [np.random.default_rng(i).integers(3, 500, 1 + 7 * i).tolist() for i in range(16)]


def our_vectors(engine: InProcessEngine, count: int = len(TEXTS)) -> torch.Tensor:
    for i in range(count):
        engine.add(i + 1, TEXTS[i], 0, extras=[VECTOR])
    engine.run()
    found = []
    for i in range(count):
        (block,) = engine.blocks[i + 1, "pooled"]
        found.append(torch.frombuffer(bytearray(block.data), dtype=torch.float32))
        assert engine.tokens[i + 1] == []
        assert engine.reasons[i + 1].type == "length"
    return torch.stack(found)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", TINY_BERTS)
def test_vectors_equal_transformers(name: str, pooling: str, normalize: bool) -> None:
    folder = tiny_bert(name, pooling, normalize=normalize)
    expected = their_vectors(folder, TEXTS, pooling, normalize=normalize)
    torch.testing.assert_close(our_vectors(InProcessEngine(folder)), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_tokens_of_a_prompt_are_left_out(pooling: str) -> None:
    """As sentence-transformers does where a folder says `include_prompt: false`."""
    folder = tiny_bert("bert", pooling)
    engine = InProcessEngine(folder)
    # One text was cut within its prompt: its last token remains. Another has none.
    prompts = [3, 3, 3, 40, 0, 7]
    for i, num_tokens in enumerate(prompts):
        engine.add(i + 1, TEXTS[i + 1], 0, extras=[behind_prompt(num_tokens)])
    engine.run()
    for i, num_tokens in enumerate(prompts):
        (block,) = engine.blocks[i + 1, "pooled"]
        found = torch.frombuffer(bytearray(block.data), dtype=torch.float32)
        hidden = their_hidden(folder, TEXTS[i + 1])
        behind = hidden[min(num_tokens, len(hidden) - 1) :]
        picked = {"mean": behind.mean(dim=0), "cls": behind[0], "last": behind[-1]}[pooling]
        expected = torch.nn.functional.normalize(picked, dim=-1)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_every_family(name: str) -> None:
    folder, variant = text_model(name), TEXT_MODELS[name]
    engine = InProcessEngine(folder, is_embedding=variant.is_embedding)
    expected = their_vectors(folder, TEXTS, variant.pooling)
    torch.testing.assert_close(our_vectors(engine), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["cohere2", "glm4"])
def test_vectors_of_decoders_whose_neighbors_rotate_together(name: str) -> None:
    folder = tiny_family(name)
    engine = InProcessEngine(folder, is_embedding=True)
    expected = their_vectors(folder, TEXTS, "last")
    torch.testing.assert_close(our_vectors(engine), expected, atol=2e-5, rtol=2e-5)


def test_vectors_of_latents_do_not_depend_on_what_pages_held() -> None:
    folder = tiny_family("deepseek_v3")
    expected = their_vectors(folder, TEXTS, "last")
    engine = InProcessEngine(folder, is_embedding=True)
    # New memory, then that of another batch.
    torch.testing.assert_close(our_vectors(engine), expected, atol=2e-5, rtol=2e-5)
    for i, text in enumerate(TEXTS):
        engine.add(100 + i, [*text, 7, 8, 9], 0, extras=[VECTOR])
    engine.run()
    for i, text in enumerate(TEXTS):
        engine.add(200 + i, text, 0, extras=[VECTOR])
    engine.run()
    again = torch.stack([numbers_of(engine, 200 + i) for i in range(len(TEXTS))])
    torch.testing.assert_close(again, expected, atol=2e-5, rtol=2e-5)


def test_vectors_behind_norms_over_all_heads() -> None:
    folder = tiny_family("olmo3_yarn")
    found = our_vectors(InProcessEngine(folder, is_embedding=True))
    torch.testing.assert_close(found, their_vectors(folder, TEXTS, "last"), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_every_family(name: str) -> None:
    folder = text_model(name)
    found = our_vectors(InProcessEngine(folder))
    torch.testing.assert_close(found, their_scores(folder, TEXTS), atol=5e-5, rtol=5e-5)


def test_a_reward_model_of_two_dense_layers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(text_model("qwen2"), folder)
    weights = {
        k: v for k, v in load_file(folder / "model.safetensors").items() if "lm_head" not in k
    }
    generator = torch.Generator().manual_seed(5)
    for name, shape in (("0", (32, 32)), ("2", (1, 32))):
        weights[f"score.{name}.weight"] = torch.empty(shape).normal_(generator=generator)
        weights[f"score.{name}.bias"] = torch.empty(shape[:1]).normal_(generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hidden = their_vectors(folder, TEXTS, "last", normalize=False)
    edit_json(folder / "config.json", architectures=["Qwen2ForRewardModel"])
    linear = torch.nn.functional.linear
    inner = linear(hidden, weights["score.0.weight"], weights["score.0.bias"]).relu()
    expected = linear(inner, weights["score.2.weight"], weights["score.2.bias"])
    found = our_vectors(InProcessEngine(folder))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE != "cpu", reason="the CPU's kernels")
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_rounded_products_keep_the_direction(name: str) -> None:
    folder = tiny_bert("bert", "mean", normalize=True) if name == "bert" else text_model(name)
    exact = our_vectors(InProcessEngine(folder))
    rounded = our_vectors(InProcessEngine(folder, rounds_products=True))
    if LINEAR.unavailable("cpu_bf16"):
        assert torch.equal(rounded, exact)
        return
    assert not torch.equal(rounded, exact)
    cosines = torch.nn.functional.cosine_similarity(rounded.double(), exact.double())
    assert (1 - cosines).max() < 1e-4


@pytest.mark.parametrize("name", ["bert_scores", "xlm_roberta_scores", "modernbert_scores"])
def test_weights_come_under_the_names_of_the_file(name: str) -> None:
    from safetensors.torch import load_file

    folder = text_model(name)
    spec = read_model_spec(folder)
    named = load_file(folder / "model.safetensors")
    # A trainer sends them so; the weight map calls them otherwise.
    assert set(named) - {weight.name for weight in spec.weights}
    model = build_model(spec, BuildContext(dtype=torch.float32, device=torch.device("cpu")))
    load_weights(model, named.items())
    assert all(holder.size_bytes for _, holder in model.holders())


def test_dense_layers_behind_the_pooling(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = add_dense(text_model("modernbert"), tmp_path / "model", [48, 24])
    expected = their_vectors(folder, TEXTS, "mean", normalize=False)
    for name in ("2_Dense", "3_Dense"):
        weights = load_file(folder / name / "model.safetensors")
        linear = torch.nn.functional.linear
        expected = linear(expected, weights["linear.weight"], weights["linear.bias"]).tanh()
    expected = torch.nn.functional.normalize(expected, dim=-1)
    assert read_model_spec(folder).output_size == 24
    torch.testing.assert_close(our_vectors(InProcessEngine(folder)), expected, atol=2e-5, rtol=2e-5)


def test_the_second_text_of_a_pair_is_of_the_second_type() -> None:
    folder = text_model("bert_scores")
    engine = InProcessEngine(folder)
    pairs = TEXTS[2:6]
    for i, text in enumerate(pairs):
        engine.add(i + 1, text, 0, extras=[of_pair(3 + i)])
    engine.add(9, pairs[0], 0, extras=[VECTOR])
    engine.run()
    expected = [
        their_scores(folder, [text], token_type_ids=(torch.arange(len(text)) >= 3 + i).long()[None])
        for i, text in enumerate(pairs)
    ]
    expected.append(their_scores(folder, [pairs[0]]))
    found = [
        torch.frombuffer(bytearray(engine.blocks[i, "pooled"][0].data), dtype=torch.float32)
        for i in (1, 2, 3, 4, 9)
    ]
    torch.testing.assert_close(torch.stack(found), torch.cat(expected), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 3},
        {"chunked_prefill_size": 5},
        {"overlap": True},
        {"max_running_requests": 1},
    ],
)
def test_neighbours_and_batches_change_nothing(options: dict[str, object]) -> None:
    folder = tiny_bert("bert")
    expected = their_vectors(folder, TEXTS, "mean")
    found = our_vectors(InProcessEngine(folder, **options))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_texts_fill_steps_up_to_the_budget_and_are_never_cut() -> None:
    engine = InProcessEngine(tiny_bert("bert"), chunked_prefill_size=20)
    lengths: list[list[int]] = []
    launch = engine.runner.launch

    def note(plan, masks=None):
        lengths.append(plan.query_lens.tolist())
        return launch(plan, masks)

    engine.runner.launch = note
    our_vectors(engine, 6)
    # 1 + 8 and 15 alone; longer ones than the budget alone, too.
    assert lengths == [[1, 8], [15], [22], [29], [36]]


QUERY = np.random.default_rng(99).integers(3, 500, 37).tolist()
BEHIND = [[*QUERY, *text] for text in TEXTS[1:9]]


@pytest.mark.parametrize("name", ["llama_scores", "qwen3_scores", "qwen3", "gemma3_causal"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_query_is_computed_once_a_step(name: str, attention: str) -> None:
    """Documents behind it take its keys, and their numbers are those of each alone."""
    folder, variant = text_model(name), TEXT_MODELS[name]
    engine = InProcessEngine(folder, is_embedding=variant.is_embedding, attention_backend=attention)
    given = [TEXTS[3], *BEHIND, TEXTS[2], *BEHIND[:2]]
    computed: list[int] = []
    compute = engine.model.compute

    def note(batch):
        computed.append(len(batch.input_ids))
        return compute(batch)

    engine.model.compute = note
    for i, text in enumerate(given):
        engine.add(i + 1, text, 0, extras=[VECTOR])
    engine.run()
    found = torch.stack([numbers_of(engine, i + 1) for i in range(len(given))])
    if variant.pooling:
        expected = their_vectors(folder, given, "last")
    else:
        expected = their_scores(folder, given)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)
    # Two whole pages of the query's 37 tokens; another text came between those and the last two.
    assert computed == [sum(map(len, given)) - 32 * (len(BEHIND) - 1) - 32]


def test_steps_are_filled_by_what_they_compute() -> None:
    engine = InProcessEngine(text_model("llama_scores"), chunked_prefill_size=96)
    steps: list[tuple[int, int]] = []
    compute = engine.model.compute

    def note(batch):
        steps.append((len(batch.lengths), len(batch.input_ids)))
        return compute(batch)

    engine.model.compute = note
    texts = [[*QUERY, 9 + i, 10] for i in range(12)]
    for i, text in enumerate(texts):
        engine.add(i + 1, text, 0, extras=[VECTOR])
    engine.run()
    found = torch.stack([numbers_of(engine, i + 1) for i in range(len(texts))])
    expected = their_scores(text_model("llama_scores"), texts)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)
    # 39 tokens, then 7 of each text that takes two pages of another's.
    assert steps == [(9, 39 + 8 * 7), (3, 39 + 2 * 7)]


def numbers_of(engine: InProcessEngine, request: int) -> torch.Tensor:
    (block,) = engine.blocks[request, "pooled"]
    return torch.frombuffer(bytearray(block.data), dtype=torch.float32)


@pytest.mark.parametrize(("name", "is_embedding"), [("llama_scores", False), ("qwen3", True)])
def test_a_shared_query_changes_no_bit_where_none_may_change(name: str, is_embedding: bool) -> None:
    def ask(texts: list[list[int]]) -> list[bytes]:
        engine = InProcessEngine(
            text_model(name), is_embedding=is_embedding, deterministic=True, overlap=True
        )
        for i, text in enumerate(texts):
            engine.add(i + 1, text, 0, extras=[VECTOR])
        engine.run()
        return [engine.blocks[i + 1, "pooled"][0].data for i in range(len(texts))]

    assert ask(BEHIND[:4]) == [ask([text])[0] for text in BEHIND[:4]]


def test_a_vector_that_cannot_be_computed_ends_its_request_alone() -> None:
    engine = InProcessEngine(tiny_bert("bert"))

    def fail(forward, batch):
        if 22 in batch.lengths:
            raise RuntimeError("planted")
        return forward(batch)

    for i in range(6):
        engine.add(i + 1, TEXTS[i], 0, extras=[VECTOR])
    with engine.computing(fail):
        engine.run()
    assert [engine.reasons[i + 1].type for i in range(6)] == ["length"] * 3 + ["abort"] + [
        "length"
    ] * 2
    assert (4, "pooled") not in engine.blocks


def test_pooling_is_read_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_bert("bert", "cls", normalize=False), folder)
    assert read_model_spec(folder).pooling == Pooling("cls", normalize=False)
    (folder / "modules.json").unlink()
    assert read_model_spec(folder).pooling == Pooling("mean", normalize=True)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.LSTM"}]')
    with pytest.raises(StartupError, match="LSTM"):
        read_model_spec(folder)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([("Normalize", "2_Normalize"), ("Dense", "2_Dense")], "in this order"),
        ([("Dense", "2_Dense"), ("Dense", "2_Dense")], "a separate folder"),
        ([("Dense", "../2_Dense")], "inside this one"),
        ([("Dense", "/2_Dense")], "inside this one"),
        ([("Dense", "")], "inside this one"),
        ([("Dense", "3_Dense")], "takes 48 numbers, not 32"),
    ],
)
def test_modules_that_do_not_fit_are_named(
    tmp_path: Path, modules: list[tuple[str, str]], named: str
) -> None:
    folder = add_dense(text_model("modernbert"), tmp_path / "model", [48, 24])
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), *modules]
    (folder / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.{k}", "path": path} for k, path in listed])
    )
    with pytest.raises(StartupError, match=named):
        read_model_spec(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_bert("bert"), folder)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(StartupError, match=named):
        read_model_spec(folder)
