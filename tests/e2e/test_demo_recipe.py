"""The demo model's recipe in its tiny form: it learns, and its folder loads in transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from recipes.demo_model.network import TINY, Network
from recipes.demo_model.train import parser, train

ARGUMENTS = "--tiny --steps 25 --block-tokens 2048 --blocks-per-step 2 --seed 3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("tiny")
    # Whatever a test before this one left switched off.
    with torch.no_grad():
        losses = train(parser().parse_args(["--out", str(folder), *ARGUMENTS.split()]))
    return folder, losses


def test_loss_goes_down(trained: tuple[Path, list[float]]) -> None:
    losses = trained[1]
    assert len(losses) == 25
    assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:5]) / 5


def test_folder_loads_in_transformers(trained: tuple[Path, list[float]]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = trained[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    assert type(model).__name__ == "Qwen3ForCausalLM"
    ours = Network(TINY)
    weights = load_file(folder / "model.safetensors")
    ours.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    ids = torch.randint(0, TINY.vocab_size - 10, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-3, atol=1e-3)


def test_tokenizer_and_template_load_in_transformers(
    trained: tuple[Path, list[float]],
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = trained[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "What is 2 + 2? 你好 👩‍💻"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    same = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == same.encode(text).ids
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.eos_token == "<|im_end|>"
