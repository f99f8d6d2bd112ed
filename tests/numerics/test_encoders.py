"""Encoders against `transformers`: vectors of texts, alone and among neighbours."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.checkpoint.pooling_config import Pooling
from runtime.errors import StartupError
from runtime.extras.pooled.front import VECTOR
from runtime.models.registry import read_model_spec
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import TINY_BERTS, edit_json, tiny_bert

TEXTS = [np.random.default_rng(i).integers(3, 500, 1 + 7 * i).tolist() for i in range(16)]


def their_vectors(folder: Path, pooling: str, *, normalize: bool) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            hidden = model(torch.tensor([text])).last_hidden_state[0]
        pick = {"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}
        found.append(pick[pooling])
    vectors = torch.stack(found)
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


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
    expected = their_vectors(folder, pooling, normalize=normalize)
    torch.testing.assert_close(our_vectors(InProcessEngine(folder)), expected, atol=2e-5, rtol=2e-5)


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
    expected = their_vectors(folder, "mean", normalize=True)
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
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_bert("bert", "cls", normalize=False), folder)
    assert read_model_spec(folder).pooling == Pooling("cls", normalize=False)
    (folder / "modules.json").unlink()
    assert read_model_spec(folder).pooling == Pooling("mean", normalize=True)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(StartupError, match="Dense"):
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
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_bert("bert"), folder)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(StartupError, match=named):
        read_model_spec(folder)
